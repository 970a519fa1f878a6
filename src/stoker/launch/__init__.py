"""Where processes run: started here, or joined where a launcher started them."""
