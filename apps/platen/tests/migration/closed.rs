//! A monitor of a source QEMU whose connection ends while QEMU lives and migrates.

use super::*;
use serde_json::{json, Value};
use stream::synth::{Configuration, MainStream, Section};

/// The end of the first connection of the made monitor.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Closes {
    /// As soon as the migration runs; there is no further connection.
    ForGood,
    /// The same, and the next connection is served.
    Once,
    /// At the order to cancel, which is not answered, for good.
    AtCancel,
    /// At the first question after the order to turn to postcopy, which is refused, for good.
    AfterRefusal,
    /// As soon as the migration runs, which may turn to postcopy; see [`REFUSED`].
    Advised,
    /// After one answer, by which the migration is in postcopy; see [`REFUSED`].
    InPostcopy,
    /// As `Advised`, and a connection is served again once the test says so.
    Long,
    /// As `Long`, but at the order to cancel, which is not answered.
    LongAtCancel,
}

impl Closes {
    /// Whether the stream announces that it may turn to postcopy.
    fn is_advised(self) -> bool {
        matches!(self, Self::Advised | Self::Long | Self::LongAtCancel)
    }
}

/// Connections that end at once before one is served again, by which the migration has failed. With
/// the pauses between them they take longer than the deadline.
const REFUSED: usize = 3;

/// A made source QEMU, which keeps its stream open. `over`: when to close at the order to cancel,
/// or to serve a connection again.
fn monitor(path: &Path, closes: Closes, over: Receiver<()>) {
    let listener = UnixListener::bind(path).unwrap();
    std::thread::spawn(move || {
        let (mut status, mut stream) = ("none", None);
        let (client, _) = listener.accept().unwrap();
        serve(client, (&mut status, &mut stream), Some((closes, &over)));
        if closes == Closes::Once {
            let (client, _) = listener.accept().unwrap();
            serve(client, (&mut status, &mut stream), None);
        }
        if matches!(closes, Closes::Advised | Closes::InPostcopy) {
            (0..REFUSED).for_each(|_| drop(listener.accept().unwrap()));
            let (client, _) = listener.accept().unwrap();
            (status, stream) = ("failed", None);
            serve(client, (&mut status, &mut stream), None);
        }
        if matches!(closes, Closes::Long | Closes::LongAtCancel) {
            while over.try_recv().is_err() {
                drop(listener.accept().unwrap());
            }
            let (client, _) = listener.accept().unwrap();
            serve(client, (&mut status, &mut stream), None);
        }
        drop(listener);
        // The stream stays open until the relay has closed it.
        if let Some(stream) = &mut stream {
            let _ = stream.read(&mut [0]);
        }
    });
}

/// The beginning of a stream, behind which QEMU may be silent.
fn beginning(is_advised: bool) -> Vec<u8> {
    let mut main = MainStream::new(4096);
    main.file_header().configuration(&Configuration { machine: "pc", ..Configuration::default() });
    if is_advised {
        main.advise_postcopy(4096);
    }
    main.section(Section::Start).block_table(&[("pc.ram", 1 << 30)]).end_of_section();
    main.section(Section::Part).page("pc.ram", 0, &[3; 4096]).end_of_section();
    main.take()
}

/// Serves a connection until it is to be closed, or the client closes it.
fn serve(
    mut client: UnixStream,
    (status, stream): (&mut &'static str, &mut Option<UnixStream>),
    closes: Option<(Closes, &Receiver<()>)>,
) {
    let version = json!({ "qemu": { "major": 10, "minor": 0, "micro": 2 } });
    let greeting = json!({ "QMP": { "version": version, "capabilities": [] } });
    writeln!(client, "{greeting}").unwrap();
    let (mut has_refused, mut has_answered) = (false, false);
    for line in BufReader::new(client.try_clone().unwrap()).lines().map_while(Result::ok) {
        let command: Value = serde_json::from_str(&line).unwrap();
        let answer = match command["execute"].as_str().unwrap() {
            "migrate" => {
                let uri = command["arguments"]["uri"].as_str().unwrap();
                let mut relay = UnixStream::connect(uri.strip_prefix("unix:").unwrap()).unwrap();
                let closes = closes.map(|(closes, _)| closes);
                let is_advised = closes.is_some_and(Closes::is_advised);
                relay.write_all(&beginning(is_advised)).unwrap();
                let in_postcopy = closes == Some(Closes::InPostcopy);
                *status = if in_postcopy { "postcopy-active" } else { "active" };
                *stream = Some(relay);
                json!({})
            }
            "migrate_cancel" => {
                match closes {
                    Some((Closes::AtCancel, over)) => {
                        let _ = over.recv_timeout(WATCHDOG);
                        return;
                    }
                    Some((Closes::LongAtCancel, _)) => return,
                    _ => {}
                }
                (*status, *stream) = ("cancelled", None);
                json!({})
            }
            "migrate-start-postcopy" => {
                has_refused = true;
                let error = json!({ "class": "GenericError", "desc": "no postcopy here" });
                writeln!(client, "{}", json!({ "error": error, "id": command["id"] })).unwrap();
                continue;
            }
            "query-migrate" => {
                let at_once = !matches!(
                    closes,
                    None | Some((
                        Closes::AtCancel | Closes::AfterRefusal | Closes::LongAtCancel,
                        _
                    ))
                );
                if (at_once && *status == "active") || has_refused || has_answered {
                    return;
                }
                has_answered = closes.is_some() && *status == "postcopy-active";
                let ram = json!({ "total": 1 << 30, "remaining": 1 << 29, "page-size": 4096 });
                json!({ "status": *status, "total-time": 1000, "ram": ram })
            }
            "query-status" => json!({ "status": "running", "running": true }),
            "query-migrate-parameters" => json!({ "downtime-limit": 300, "max-bandwidth": 0 }),
            "query-migrate-capabilities" => json!([
                { "capability": "events", "state": false },
                { "capability": "return-path", "state": false },
                { "capability": "postcopy-ram", "state": false },
            ]),
            "query-yank" => json!([]),
            _ => json!({}),
        };
        writeln!(client, "{}", json!({ "return": answer, "id": command["id"] })).unwrap();
    }
}

/// Starts a `migrate` at such a QEMU, with a deadline of 1 s if the test does not interrupt.
/// Returns it, the sender that closes the monitor or opens it again, and the destination QEMU's
/// socket.
fn start(rig: &Rig, closes: Closes) -> (Platen, mpsc::Sender<()>, UnixListener) {
    let destination = UnixListener::bind(rig.at("dst")).unwrap();
    let (sender, over) = mpsc::channel();
    monitor(&rig.at("qmp"), closes, over);
    let qmp = unix(&rig.at("qmp"));
    let args = ["migrate", "--insecure", "--peer", &rig.address, "--qmp", &qmp];
    let mut args = [&args[..], &["--codec", "none"]].concat();
    if !matches!(closes, Closes::Long | Closes::LongAtCancel) {
        args.extend(["--deadline", "1"]);
    }
    if closes == Closes::AfterRefusal {
        args.extend(["--postcopy", "after", "0"]);
    }
    (Platen::start("", &args), sender, destination)
}

const CANCELLED: &str = "cancelled (not over after 1 s)";

/// Nobody else would end this migration.
#[test]
fn a_deadline_holds_when_the_monitor_has_closed() {
    let rig = Rig::new("");
    let (mut migrate, _over, _destination) = start(&rig, Closes::ForGood);
    migrate.says("closed its monitor");
    let (status, said) = migrate.ends();
    assert_eq!(status, Some(1), "{said}");
    assert!(said.contains(CANCELLED), "{said}");
}

#[test]
fn a_monitor_that_has_closed_is_connected_to_again() {
    let rig = Rig::new("");
    let (migrate, _over, _destination) = start(&rig, Closes::Once);
    let (status, said) = migrate.ends();
    assert_eq!(status, Some(1), "{said}");
    assert!(said.contains(&format!("{CANCELLED}; the source QEMU's VM is 'running'")), "{said}");
    assert_eq!(said.matches("closed its monitor").count(), 1, "{said}");
}

/// A source that may have turned to postcopy is left alone; this one has refused.
#[test]
fn a_deadline_holds_when_the_monitor_has_closed_after_it_refused_postcopy() {
    let rig = Rig::new("");
    let (mut migrate, _over, _destination) = start(&rig, Closes::AfterRefusal);
    migrate.says("no postcopy here");
    migrate.says("closed its monitor");
    let (status, said) = migrate.ends();
    assert_eq!(status, Some(1), "{said}");
    assert!(said.contains(CANCELLED), "{said}");
}

/// The end of its relay could leave the VM at neither host, whoever has turned the source.
#[test]
fn no_deadline_ends_a_migration_that_may_be_in_postcopy_when_the_monitor_has_closed() {
    for closes in [Closes::Advised, Closes::InPostcopy] {
        let rig = Rig::new("");
        let (migrate, _over, _destination) = start(&rig, closes);
        let (status, said) = migrate.ends();
        assert_eq!(status, Some(1), "{said}");
        assert!(said.contains("closed its monitor"), "{said}");
        assert!(!said.contains("not over after"), "{said}");
    }
}

/// The order may not have reached QEMU, which has stopped its VM and waits for the destination.
#[test]
fn a_cancel_that_was_not_answered_is_made_good_when_the_monitor_closes() {
    let rig = Rig::new("");
    let (mut migrate, over, _destination) = start(&rig, Closes::AtCancel);
    migrate.says("cancelling later");
    over.send(()).unwrap();
    let (status, said) = migrate.ends();
    assert_eq!(status, Some(1), "{said}");
    assert!(said.contains(CANCELLED), "{said}");
}

/// Regression: an interrupt ended the relay of a source that may have been in postcopy, because its
/// monitor had closed: the VM could be left at neither host. And no look at an interrupt that waits
/// connected to the monitor again, so the interrupt waited for ever.
#[test]
fn an_interrupt_without_a_monitor_waits_for_one_if_the_source_may_be_in_postcopy() {
    for closes in [Closes::Long, Closes::LongAtCancel] {
        let rig = Rig::new("");
        let (mut migrate, again, destination) = start(&rig, closes);
        // The relay has read that the source can turn.
        let (mut destination, _) = destination.accept().unwrap();
        destination.read_exact(&mut [0]).unwrap();
        if closes == Closes::Long {
            migrate.says("closed its monitor");
        }
        kill_process(Pid::from_child(&migrate.child), Signal::INT).unwrap();
        migrate.says("no connection to the source QEMU's monitor");
        again.send(()).unwrap();
        let (status, said) = migrate.ends();
        assert_eq!(status, Some(1), "{said}");
        assert_eq!(said.matches("closed its monitor").count(), 1, "{said}");
        assert_eq!(said.matches("cancelling (interrupt again to force)").count(), 1, "{said}");
        assert!(said.contains("cancelled; the source QEMU's VM is 'running'"), "{said}");
    }
}
