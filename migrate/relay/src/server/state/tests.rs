//! Sessions that get their first link, that are asked about, and that are removed.

use super::*;
use crate::qemu_socket::QemuAddress;
use session::Grants;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

const TOKEN: &str = "0123456789abcdef0123456789abcdef";
/// Much longer than [`ANSWERED`].
const RESUME: Duration = Duration::from_secs(300);

struct Quiet;

impl Host for Quiet {
    fn prepare(&self, _: &Option<String>, _: &Hello) -> Result<(), String> {
        Ok(())
    }

    fn serve(&self, _: &Option<String>, _: &Destination) {}

    fn notice(&self, _: &str) {}
}

/// A receiver with a session whose links were never opened, and a hello that asks about it.
fn asked_about() -> (Arc<Server>, Hello) {
    let target = QemuAddress::Tcp(SocketAddr::from(([127, 0, 0, 1], 9)));
    let config = ServerConfig {
        targets: vec![(None, target.clone())],
        acceptor: None,
        decompress_threads: 1,
        qat: None,
        page_size: 4096,
        grants: Grants::default(),
        delta_cache: 0,
        seed: None,
        history: 0,
        resume: RESUME,
        silence: session::SILENCE,
    };
    let server = Server::new(config, Arc::new(Quiet)).unwrap();
    let hello = Hello::of_one_link(4096).unwrap();
    server.open_target(&hello, ("the source", None), &None, &target, TOKEN).unwrap();
    (server, Hello { token: Some(TOKEN.into()), ask: true, ..hello })
}

/// How long the receiver still waits for a question about its only ended session.
fn waits(server: &Server) -> Duration {
    let ended = server.ended.lock().unwrap();
    let until = ended[0].unasked_until.expect("a session that was asked about");
    until.saturating_duration_since(Instant::now())
}

/// The thread that answers was about to do so when the session's own thread removed the session.
#[test]
fn a_session_that_is_removed_behind_its_question_waits_for_no_other() {
    let (server, hello) = asked_about();
    let question = server.take_question(&hello, TOKEN, None);
    server.remove_session(&None, &hello.session);
    assert!(matches!(question, Question::About { has_ended: false, .. }));
    assert!(waits(&server) > RESUME, "its answer may be lost: {:?}", waits(&server));
    server.note_answered(&hello.session);
    assert!(waits(&server) <= ANSWERED, "{:?}", waits(&server));
}

#[test]
fn a_session_that_is_removed_behind_its_answer_waits_for_no_other() {
    let (server, hello) = asked_about();
    server.verdict(&hello, None).unwrap();
    server.note_answered(&hello.session);
    server.remove_session(&None, &hello.session);
    assert!(waits(&server) <= ANSWERED, "{:?}", waits(&server));
}

#[test]
fn a_session_that_is_removed_before_its_question_waits_for_no_other() {
    let (server, hello) = asked_about();
    let active = server.lock_sessions()[&hello.session].clone();
    let lost =
        session::SessionError::NotResumed { lost: "it was cut".into(), seconds: 300, tried: None };
    active.destination.session().fail(lost);
    server.remove_session(&None, &hello.session);
    assert!(waits(&server) > RESUME, "{:?}", waits(&server));
    let (reason, answer) = server.verdict(&hello, None).unwrap();
    assert_eq!((reason.as_str(), answer.committed), (HAS_ENDED, false));
    assert!(waits(&server) > RESUME, "its answer may be lost: {:?}", waits(&server));
    server.note_answered(&hello.session);
    assert!(waits(&server) <= ANSWERED, "{:?}", waits(&server));
}

/// Its source opens a further link meanwhile, and has not read the ABORT yet.
#[test]
fn a_link_of_a_session_that_this_end_has_ended_learns_why() {
    let (server, hello) = asked_about();
    let link = Hello { ask: false, ..hello.clone() };
    let active = server.lock_sessions()[&hello.session].clone();
    let reason = "a QEMU awaits a VM there".to_owned();
    active.destination.session().fail(session::SessionError::Local { reason: reason.clone() });
    assert_eq!(server.verdict(&link, None).unwrap().0, reason);
    drop(active);
    server.remove_session(&None, &hello.session);
    assert_eq!(server.verdict(&link, None).unwrap().0, reason);
}

#[test]
fn a_session_in_doubt_is_remembered_whatever_sessions_end_behind_it() {
    let (server, hello) = asked_about();
    let active = server.lock_sessions()[&hello.session].clone();
    let lost =
        session::SessionError::NotResumed { lost: "it was cut".into(), seconds: 300, tried: None };
    active.destination.session().fail(lost);
    drop(active);
    server.remove_session(&None, &hello.session);
    let target = QemuAddress::Tcp(SocketAddr::from(([127, 0, 0, 1], 9)));
    for _ in 0..MAX_ENDED + 5 {
        let other = Hello::of_one_link(4096).unwrap();
        server.open_target(&other, ("another source", None), &None, &target, TOKEN).unwrap();
        server.remove_session(&None, &other.session);
    }
    assert_eq!(server.ended.lock().unwrap().len(), MAX_ENDED);
    assert!(server.verdict(&hello, None).is_some(), "its source never gets an answer");
}

#[test]
fn a_link_of_a_session_that_goes_on_is_no_question() {
    let (server, hello) = asked_about();
    let link = Hello { ask: false, ..hello.clone() };
    assert!(matches!(server.take_question(&link, TOKEN, None), Question::None));
    let strange = Hello { session: "0".repeat(32), ..link };
    assert!(matches!(server.take_question(&strange, TOKEN, None), Question::NotHere));
    let other = "f".repeat(32);
    assert!(matches!(server.take_question(&hello, &other, None), Question::NotHere));
    assert!(server.verdict(&Hello { token: Some(other), ..hello.clone() }, None).is_none());
    assert!(server.lock_sessions()[&hello.session].destination.session().failure().is_none());
}

/// As when a service tells the process of a session that another source wants its target.
#[test]
fn a_carried_session_gives_way_once_its_links_are_lost() {
    let (server, hello) = asked_about();
    let active = server.lock_sessions()[&hello.session].clone();
    let session = active.destination.session();
    server.give_way();
    assert!(session.failure().is_none(), "its source has not opened a link yet");
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let source = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    active.add_link(0, listener.accept().unwrap().0.into()).unwrap();
    server.give_way();
    assert!(session.failure().is_none(), "its source is there");
    drop(source);
    let until = Instant::now() + Duration::from_secs(60);
    while !session.has_lost_its_links() {
        assert!(Instant::now() < until, "the loss is not noticed");
        std::thread::sleep(Duration::from_millis(1));
    }
    server.give_way();
    assert!(active.destination.gave_way());
    assert!(session.failure().is_some());
    session.join();
}

/// A promised session whose source goes away as it opens link 0: no loss of a link ends it, so the
/// time for its first link has to.
#[test]
fn a_link_that_could_not_be_added_is_not_the_first_link() {
    let (server, hello) = asked_about();
    let hello = Hello { ask: false, ..hello };
    let active = server.lock_sessions()[&hello.session].clone();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let link = || {
        let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (socket, listener.accept().unwrap().0)
    };
    let (_source, socket) = link();
    // The welcome cannot be written, as on a connection that was reset.
    socket.shutdown(Shutdown::Write).unwrap();
    server.join(socket.into(), &hello, TOKEN, "the source").unwrap_err();
    assert!(!active.has_joined(), "nothing ends this session");
    let (_source, socket) = link();
    server.join(socket.into(), &hello, TOKEN, "the source").unwrap();
    assert!(active.has_joined());
    let reason = "the test is over".into();
    active.destination.session().fail(SessionError::Local { reason });
    active.destination.session().join();
}
