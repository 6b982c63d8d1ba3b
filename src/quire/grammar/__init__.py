"""What a reply must look like: grammars, compiled by `llguidance`, and the masks that they make while one samples."""
