"""Model families: one folder or file each, behind the contract in base.py."""
