//! Measures what a request costs its application on this machine: CPU time of the calling thread
//! for submission, poll and callback; the device's work runs on the device's threads. Since the
//! device is simulated, this is a bound of what a driver's measured cost can be.
//!
//! `cargo run --release -p qat-sim --example cost`

#![expect(unsafe_code, reason = "calls a C interface")]

#[path = "../tests/device/rig.rs"]
#[allow(dead_code, reason = "the tests use more of it")]
mod rig;

use qat_abi::{CPA_STATUS_RETRY, CPA_STATUS_SUCCESS};
use rig::{text, Rig, Slot};
use std::time::{Duration, Instant};

const REQUESTS: u32 = 400_000;
const IN_FLIGHT: usize = 128;

fn thread_ns() -> i64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the out pointer is a local.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    time.tv_sec * 1_000_000_000 + time.tv_nsec
}

fn main() {
    let rig = Rig::new("engine stored");
    let mut slots: Vec<Slot> = (0..IN_FLIGHT).map(|_| Slot::new()).collect();
    slots.iter_mut().for_each(|slot| slot.fill(&text(4096), 5000));
    let (start, cpu) = (Instant::now(), thread_ns());
    let mut submitted = 0;
    let mut times = vec![0; IN_FLIGHT];
    while submitted < REQUESTS {
        for (slot, times) in slots.iter_mut().zip(&mut times) {
            if slot.times() == *times {
                *times += 1;
                submitted += 1;
                assert_eq!(rig.compress(slot), CPA_STATUS_SUCCESS);
            }
        }
        if rig.poll() == CPA_STATUS_RETRY {
            std::thread::sleep(Duration::from_micros(20));
        }
    }
    rig.wait(&slots, submitted);
    let (elapsed, cpu) = (start.elapsed(), thread_ns() - cpu);
    let device = rig.counters().device_cpu_ns;
    println!(
        "simulated, 4-KiB stored, {IN_FLIGHT} in flight: {:.0} requests/s, application {} ns, device {} ns CPU per request",
        f64::from(submitted) / elapsed.as_secs_f64(),
        cpu / i64::from(submitted),
        device / u64::from(submitted),
    );
}
