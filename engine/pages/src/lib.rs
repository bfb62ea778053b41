//! Preallocated page slots, and the scan for same-filled pages.
