"""What numbers alone show: copies that differ, shards that are identical, ties that broke, writes that did not take."""
