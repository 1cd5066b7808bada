"""Check: do all ranks of a program issue collectives that match?"""
