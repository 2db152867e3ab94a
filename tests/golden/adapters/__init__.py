"""How is each recorded function called here? One file for each part of the project."""
