//! Whole-VM tests: real QEMUs, a guest that knows every byte of its memory, and what goes wrong on the way.
