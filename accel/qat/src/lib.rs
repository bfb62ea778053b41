//! A driver of Intel QAT data compression that never loses a page.
