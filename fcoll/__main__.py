from fcoll.cli import script

script()
