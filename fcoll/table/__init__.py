"""The table: a family file holds a collective whole; ``collectives.py`` assembles the rows."""
