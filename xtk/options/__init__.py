"""Options of the commands, declared once; command line, `--config`, recipes, help and configurations come from them."""
