//! Gives the shared object its SONAME.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libusdm.so.0");
    // Unloading the library while a device's thread still runs in it would crash the process.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
