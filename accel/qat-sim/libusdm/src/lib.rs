//! libusdm.so.0 of the simulated QAT device.
