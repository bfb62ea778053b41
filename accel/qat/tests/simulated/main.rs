//! The driver on the simulated device (`qat-sim`). All in one process: the device is the process's,
//! and tests take turns.

mod faults;
mod life;
mod matrix;
mod shortage;
mod sim;
