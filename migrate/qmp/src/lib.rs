//! A small client of QEMU's monitor protocol (QMP).
