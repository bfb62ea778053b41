//! QEMU's migration stream as lossless tokens, and the packed form they travel in. No I/O.
