//! Steps of a hand-over at which tests kill the supervisor or a server. A release build does
//! nothing here.

/// Marks the step `name`. In a debug build a process with `PLATEN_KILL_AT=name` in its environment
/// kills itself here. With `PLATEN_KILL_AT=name:PATH` it does so only if it can create the file
/// `PATH`, and thus once.
pub fn step(name: &str) {
    if cfg!(debug_assertions) {
        kill_at(name, std::env::var("PLATEN_KILL_AT").ok().as_deref());
    }
}

fn kill_at(name: &str, wanted: Option<&str>) {
    let Some((wanted, once)) = wanted.map(|wanted| wanted.split_once(':').unwrap_or((wanted, "")))
    else {
        return;
    };
    let first = || once.is_empty() || std::fs::File::create_new(once).is_ok();
    if wanted == name && first() {
        let _ =
            rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    }
}
