"""Where processes run: started here by the torch elastic agent, or joined where a launcher started them."""
