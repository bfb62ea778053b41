//! An interrupt, and source QEMUs that do not answer.

use super::*;
use std::sync::mpsc::{self, Receiver, Sender};

/// A monitor that is silent from the order to migrate on.
struct Mute {
    migrates: Receiver<()>,
    cancels: Receiver<()>,
    /// Dropped: it answers again.
    silence: Sender<()>,
}

impl Mute {
    fn at(path: &Path) -> Self {
        let listener = UnixListener::bind(path).unwrap();
        let ((begun, migrates), (cancelled, cancels)) = (mpsc::channel(), mpsc::channel());
        let (silence, silent) = mpsc::channel::<()>();
        std::thread::spawn(move || {
            let mut status = "none";
            for client in listener.incoming().map_while(Result::ok) {
                let migration = |command: &str| match command {
                    "migrate" => {
                        status = "active";
                        let _ = begun.send(());
                        None
                    }
                    "migrate_cancel" => {
                        status = "cancelled";
                        let _ = cancelled.send(());
                        None
                    }
                    "query-migrate" => {
                        if status == "active" {
                            let _ = silent.recv();
                        }
                        Some(json!({ "status": status }))
                    }
                    _ => None,
                };
                let _ = serve(client, 0, migration);
            }
        });
        Self { migrates, cancels, silence }
    }
}

/// `platen receive` for a target of this name, and its address.
fn receiver(rig: &Rig, name: &str) -> (Evacuate, String) {
    let log = rig.at("receive");
    let deliver = format!("{name}=unix:{}", rig.at("dst").display());
    let child = Command::new(env!("CARGO_BIN_EXE_platen"))
        .args(["receive", "--insecure", "--listen", "127.0.0.1:0", "--deliver", &deliver])
        .stdout(Stdio::null())
        .stderr(std::fs::File::create(&log).unwrap())
        .spawn()
        .unwrap();
    let receiver = Evacuate { child, log };
    let address = receiver.says("listening on ");
    let address = address.split(' ').next_back().unwrap().to_owned();
    (receiver, address)
}

/// A migration that no order reaches is reported as in doubt, and is neither forced nor killed: it
/// cancels by itself when its monitor answers again.
#[test]
fn an_interrupt_leaves_a_silent_source_in_doubt_and_forces_nothing() {
    let rig = Rig::new();
    let mute = Mute::at(&rig.at("mute"));
    let (_receiver, address) = receiver(&rig, "mute");
    let (vm, json) = (format!("{},{address}", rig.vm("mute")), rig.json());
    let deaf = rig.domain("deaf");
    let domain = format!("--domain={deaf}");
    let words = ["--insecure", &vm, &domain, "--libvirt=b", "--at-once=2", &json];
    let mut evacuate = domains::evacuate(&rig, "log", &words);
    let ids = ["mute", &deaf].map(|name| process(&evacuate, name));
    mute.migrates.recv_timeout(WATCHDOG).unwrap();
    evacuate.signal(Signal::INT);
    evacuate.says("mute: the source QEMU's monitor does not answer");
    assert_eq!(evacuate.ends(), Some(2), "{}", evacuate.said());
    let mut found = rig.outcomes();
    found.sort();
    for ((name, outcome, error), source) in found.iter().zip(["libvirt", "monitor"]) {
        assert_eq!(outcome, "in-doubt", "{name}: {error}");
        let says = format!("{source} has not answered for 60 s");
        assert!(error.contains(&says) && error.contains("goes on"), "{name}: {error}");
    }
    for id in ids {
        assert!(test_kill_process(id).is_ok() && !is_zombie(id), "{id:?} has ended");
    }
    kill_process(ids[1], Signal::KILL).unwrap();
    assert!(mute.cancels.try_recv().is_err());
    drop(mute.silence);
    mute.cancels.recv_timeout(WATCHDOG).unwrap();
    wait_for_end(ids[0]);
}

/// A user who gets no answer repeats the interrupt, and `timeout` sends its signal twice. Neither
/// forces the end of a migration that may be turning to postcopy.
#[test]
fn interrupts_that_were_not_answered_yet_force_nothing() {
    let rig = Rig::new();
    let mute = Mute::at(&rig.at("mute"));
    let (_receiver, address) = receiver(&rig, "mute");
    let log = rig.at("log");
    let child = Command::new(env!("CARGO_BIN_EXE_platen"))
        .args(["migrate", "--insecure", "--postcopy", "when-needed", "--name", "mute"])
        .args(["--peer", &address, "--qmp", &format!("unix:{}", rig.at("mute").display())])
        .stdout(Stdio::null())
        .stderr(std::fs::File::create(&log).unwrap())
        .spawn()
        .unwrap();
    let mut migrate = Evacuate { child, log };
    assert!(mute.migrates.recv_timeout(WATCHDOG).is_ok(), "{}", migrate.said());
    for signal in [Signal::INT, Signal::TERM] {
        migrate.signal(signal);
    }
    migrate.says("does not answer: the source may be turning to postcopy");
    assert!(migrate.child.try_wait().unwrap().is_none(), "{}", migrate.said());
    assert!(mute.cancels.try_recv().is_err());
    drop(mute.silence);
    mute.cancels.recv_timeout(WATCHDOG).unwrap();
    assert_eq!(migrate.ends(), Some(1), "{}", migrate.said());
    assert!(migrate.said().contains("cancelled; "), "{}", migrate.said());
}

/// The order to cancel at the deadline is not answered in time, and QEMU has turned to postcopy by
/// then, as another client has ordered. The relay must learn that, or no byte that starts the VM at
/// the destination goes out any more.
#[test]
fn a_cancel_at_the_deadline_that_is_not_answered_is_looked_after() {
    let rig = Rig::new();
    let listener = UnixListener::bind(rig.at("mute")).unwrap();
    let (silence, silent) = mpsc::channel::<()>();
    std::thread::spawn(move || {
        let mut status = "none";
        for client in listener.incoming().map_while(Result::ok) {
            let _ = serve(client, 0, |command| match command {
                "migrate" => {
                    status = "active";
                    None
                }
                "migrate_cancel" => {
                    let _ = silent.recv();
                    status = "postcopy-active";
                    None
                }
                "query-migrate" => Some(json!({ "status": status })),
                _ => None,
            });
        }
    });
    let (_receiver, address) = receiver(&rig, "mute");
    let log = rig.at("log");
    let child = Command::new(env!("CARGO_BIN_EXE_platen"))
        .args(["migrate", "--insecure", "--deadline", "1", "--name", "mute"])
        .args(["--peer", &address, "--qmp", &format!("unix:{}", rig.at("mute").display())])
        .stdout(Stdio::null())
        .stderr(std::fs::File::create(&log).unwrap())
        .spawn()
        .unwrap();
    let migrate = Evacuate { child, log };
    migrate.says("does not answer: cancelling later");
    drop(silence);
    // Not the sentence of the controller, which gives its order no second time.
    migrate.says("platen: too late to cancel");
}

/// Nobody interrupts: the VM is reported as in doubt, and the others take their turns.
#[test]
fn a_source_that_does_not_answer_keeps_no_other_vm_from_its_turn() {
    let rig = Rig::new();
    let mute = Mute::at(&rig.at("mute"));
    let (_receiver, address) = receiver(&rig, "mute");
    let (vm, json) = (format!("{},{address}", rig.vm("mute")), rig.json());
    let web = rig.domain("web");
    let domain = format!("--domain={web}");
    let words = ["--insecure", &vm, &domain, "--libvirt=b", "--at-once=1", &json];
    let mut evacuate = domains::evacuate(&rig, "log", &words);
    let id = process(&evacuate, "mute");
    mute.migrates.recv_timeout(WATCHDOG).unwrap();
    assert_eq!(evacuate.ends(), Some(1), "{}", evacuate.said());
    let found = rig.outcomes();
    let shape: Vec<_> = found.iter().map(|(name, outcome, _)| (&name[..], &outcome[..])).collect();
    assert_eq!(shape, [("mute", "in-doubt"), (&web[..], "moved")], "{found:?}");
    let error = &found[0].2;
    assert!(error.contains("has not answered for 60 s, and nothing was sent"), "{error}");
    // It was neither told to cancel nor forced.
    assert!(test_kill_process(id).is_ok() && !is_zombie(id), "{id:?} has ended");
    assert!(mute.cancels.try_recv().is_err());
    kill_process(id, Signal::KILL).unwrap();
}
