//! Compression through Intel's QATzip library, with its traps fenced.
