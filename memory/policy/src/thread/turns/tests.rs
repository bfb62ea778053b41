use super::*;
use rustix::event::{eventfd, EventfdFlags};
use store::{Options, Store};

fn turns(cpu: u32, pressure: &str) -> Turns {
    let store = Store::create(64, Options::default()).unwrap();
    let mut settings = Settings { cpu, cpu_pressed: 100, ..Settings::default() };
    settings.pressure.file = pressure.into();
    let counters = Arc::new(Counters::default());
    let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
    Turns {
        sweep: Sweep::new(store.worker().unwrap(), &settings, &counters).unwrap(),
        training: None,
        back: None,
        requests: None,
        gauge: Gauge::new(&settings.pressure),
        stop: Arc::new(stop),
        settings,
        counters,
    }
}

/// Regression: a step that cost more than about 50 ms was followed by a rest of a second, at any
/// share.
#[test]
fn a_costly_step_is_followed_by_a_rest_of_its_whole_share() {
    let mut slow = turns(5, "/nonexistent/pressure");
    let begin = Instant::now();
    assert!(slow.rest(Duration::from_millis(100)).is_ok());
    assert!(begin.elapsed() >= Duration::from_millis(1900), "{:?}", begin.elapsed());
    // An hour of work has ended when the thread is to end.
    rustix::io::write(&slow.stop, &1_u64.to_ne_bytes()).unwrap();
    assert!(slow.rest(Duration::from_secs(3600)).is_err());
    // While memory is short, the share is another one.
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(&file, "some avg10=99.00 avg60=0.00\n").unwrap();
    let mut pressed = turns(1, file.path().to_str().unwrap());
    assert!(pressed.rest(Duration::from_secs(3600)).is_ok());
}
