"""Where the parameters live between steps, by one strategy a stage, and what watches over them."""
