"""Does a parallel step compute the function of one device? Found out in exact arithmetic."""
