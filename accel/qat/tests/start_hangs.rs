//! A start of the library that never returns. It is a program of its own: the library is started
//! once in a process.

#[expect(dead_code, reason = "shared with the other tests of the simulated device")]
#[path = "simulated/sim.rs"]
mod sim;

use qat::{Hang, StartError};

#[test]
fn a_start_that_never_returns_is_an_error_that_names_the_call() {
    let sim = sim::Sim::turn();
    sim.script("instances 1; now block process");
    let error = sim.start_at_once().unwrap_err();
    let StartError::Hang(Hang { call, seconds, .. }) = &error else { panic!("{error}") };
    assert_eq!(*call, "icp_sal_userStartMultiProcess");
    // A start may take longer than other calls.
    assert!(*seconds >= 30, "{error}");
    assert!(error.to_string().contains("has not returned for"), "{error}");
    // The process ends without the library's exit handlers, and starts it no second time.
    assert!(qat::is_stuck());
    assert_eq!(sim.start_at_once().unwrap_err(), StartError::AlreadyStarted);
}
