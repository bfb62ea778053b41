//! Gives the shared object the name that programs look for.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libusdm.so.0");
    // A library that is gone while a device's thread still runs in it ends the process.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
