"""Who has proven its layers: probes against the qspec, and what they came to. A joiner's arithmetic is tested, not believed."""
