"""Views of a plan: summary, tree, tables, reasons, differences, HTML. A new view goes here."""
