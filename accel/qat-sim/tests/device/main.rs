//! The device as an application sees it, in process.

#![expect(unsafe_code, reason = "calls a C interface")]

mod bad_calls;
mod death;
mod faults;
mod good;
mod rig;
