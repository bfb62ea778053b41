//! libqat.so.4 of the simulated QAT device.
