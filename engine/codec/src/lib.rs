//! Page codecs: independent, checksummed, bounded units of compressed bytes.
