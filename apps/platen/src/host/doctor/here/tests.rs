use super::super::Verdict;
use super::*;
use socket2::{Domain, Socket, Type};
use std::os::unix::fs::PermissionsExt;

const DOORS: u16 = 10;

/// Neighbouring ports of this machine that no other socket gets while these hold them: those of
/// the doors, and one behind them.
struct Ports {
    first: u16,
    _held: Vec<Socket>,
}

impl Ports {
    fn new() -> Self {
        // Another process may have a port of the range.
        (0..1000).find_map(|_| Self::range().ok()).expect("ports that are free")
    }

    fn range() -> std::io::Result<Self> {
        let mut held = vec![Self::hold(0)?];
        let first = held[0].local_addr()?.as_socket().expect("an address of IPv4").port();
        for nth in 1..=DOORS {
            held.push(Self::hold(first.saturating_add(nth))?);
        }
        Ok(Self { first, _held: held })
    }

    fn hold(port: u16) -> std::io::Result<Socket> {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        // No other socket is bound to the port now. Then SO_REUSEADDR lets a listener of this
        // test have the port besides: the socket here does not listen.
        socket.bind(&SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)).into())?;
        socket.set_reuse_address(true)?;
        Ok(socket)
    }
}

/// Settings of host `a`, with certificates for these names, for which no port is opened.
fn settings(folder: &Path, names: &[&str], days: u32, head: &str) -> Settings {
    settings_of(folder, names, days, head, 50110)
}

/// The same, with a first port of the doors.
fn settings_of(folder: &Path, names: &[&str], days: u32, head: &str, first: u16) -> Settings {
    let authority = tls::Authority::at(&folder.join("ca"));
    authority.init(true).unwrap();
    let names: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
    let issued = authority.issue(&names, days, true).unwrap();
    let text = format!(
        "{head}\ntls_dir = \"{}\"\n[[host]]\nname = \"a\"\ndoor = \"127.80.0.1\"\nports = \"100-109\"\n\
         listen = \"127.81.7.1\"\n[[host]]\nname = \"b\"\ndoor = \"127.81.7.2\"\n\
         ports = \"{first}-{}\"\n",
        issued.dir.display(),
        first + DOORS - 1
    );
    Settings::given(host::Config::parse(&text).unwrap(), "a".into()).unwrap()
}

#[test]
fn a_certificate_is_for_this_host_and_good_for_a_while() {
    let folder = tempfile::tempdir().unwrap();
    let judged = |names: &[&str], days| certificate(&settings(folder.path(), names, days, ""));
    assert_eq!(judged(&["a", "10.0.0.1"], 100).verdict, Verdict::Ok);
    assert_eq!(judged(&["a"], 20).verdict, Verdict::Warn);
    let other = judged(&["c"], 100);
    assert_eq!(other.verdict, Verdict::Fail);
    assert!(other.found.contains("is for c, and the other hosts ask for 'a'"), "{other:?}");
    let settings = settings(folder.path(), &["a"], 100, "");
    fs::remove_file(settings.config.tls_dir.join("cert.pem")).unwrap();
    assert_eq!(certificate(&settings).verdict, Verdict::Fail);
    // A CA that has not signed it.
    let mine = self::settings(folder.path(), &["a"], 100, "");
    let other = tls::Authority::at(&folder.path().join("other"));
    other.init(false).unwrap();
    fs::copy(folder.path().join("other/ca.pem"), mine.config.tls_dir.join("ca.pem")).unwrap();
    assert_eq!(certificate(&mine).verdict, Verdict::Fail);
    assert_eq!(ends(1000 * DAY, 1000 * DAY).verdict, Verdict::Fail);
    assert!(ends(1000 * DAY, 1003 * DAY).found.contains("3 days ago"));
}

#[test]
fn users_keys_and_folders_are_looked_at() {
    assert_eq!(users(&["nobody-of-that-name".into()]).verdict, Verdict::Warn);
    assert_eq!(users(&["root".into(), "x".into()]).verdict, Verdict::Ok);
    assert_eq!(sockets().verdict, Verdict::Ok);
    let folder = tempfile::tempdir().unwrap();
    let key = folder.path().join("key.pem");
    fs::write(&key, "").unwrap();
    let found = fs::metadata(&key).unwrap();
    let (uid, gid) = (found.uid(), found.gid());
    let judged = |mode, uid, gid| {
        fs::set_permissions(&key, PermissionsExt::from_mode(mode)).unwrap();
        key_of(&key, uid, gid).unwrap().verdict
    };
    assert_eq!(judged(0o600, uid, gid + 1), Verdict::Ok);
    assert_eq!(judged(0o640, uid + 1, gid), Verdict::Ok);
    assert_eq!(judged(0o600, uid + 1, gid), Verdict::Fail);
    assert_eq!(judged(0o640, uid + 1, gid + 1), Verdict::Fail);
    assert_eq!(key_of(Path::new("/nonexistent"), 0, 0), None);

    let open = |mode| {
        fs::set_permissions(folder.path(), PermissionsExt::from_mode(mode)).unwrap();
        run_dir(folder.path()).map(|finding| finding.verdict)
    };
    assert_eq!((open(0o777), open(0o700)), (Some(Verdict::Fail), None));

    let sockets = folder.path().join("a");
    assert_eq!(unix_sockets(&sockets).verdict, Verdict::Warn);
    fs::create_dir(&sockets).unwrap();
    fs::set_permissions(&sockets, PermissionsExt::from_mode(0o700)).unwrap();
    assert_eq!(unix_sockets(&sockets).verdict, Verdict::Fail);
    host::make_own_folder(&sockets, &host::AllowedUsers(vec![64055])).unwrap();
    let judged = |mode| {
        fs::set_permissions(folder.path(), PermissionsExt::from_mode(mode)).unwrap();
        unix_sockets(&sockets)
    };
    assert_eq!(judged(0o711).verdict, Verdict::Ok);
    // The folder above, as systemd may set it after the service has opened it.
    let shut = judged(0o700);
    assert_eq!(shut.verdict, Verdict::Fail);
    let above = folder.path().display().to_string();
    assert!(shut.found.contains(&format!("through {above} ")), "{shut:?}");
}

#[test]
fn taken_ports_and_shut_doors_are_failures() {
    let folder = tempfile::tempdir().unwrap();
    let ports = Ports::new();
    let port = ports.first + DOORS;
    let settings = settings_of(folder.path(), &["a"], 100, &format!("port = {port}"), ports.first);
    let judged =
        |findings: Vec<Finding>| findings.into_iter().map(|it| it.verdict).collect::<Vec<_>>();
    assert_eq!(judged(free_ports(&settings)), [Verdict::Ok, Verdict::Ok]);
    let taken = SocketAddr::from(([127, 81, 7, 2], ports.first + 3));
    // At all addresses, too: such a process gets the migrations to the door while no service runs.
    for at in [SocketAddr::from((Ipv4Addr::UNSPECIFIED, taken.port())), taken] {
        let _door = TcpListener::bind(at).unwrap();
        let findings = free_ports(&settings);
        assert!(findings[1].found.contains(&taken.to_string()), "{at}: {findings:?}");
    }
    let _door = TcpListener::bind(taken).unwrap();
    let _port = TcpListener::bind(("127.81.7.1", port)).unwrap();
    assert_eq!(judged(free_ports(&settings)), [Verdict::Fail, Verdict::Fail]);

    let open = |doors| open_doors(&settings, &HostStatus { doors, ..HostStatus::default() });
    assert_eq!(open(10).verdict, Verdict::Ok);
    assert!(open(9).found.contains("9 of 10"));
    assert_eq!(served(Err(&anyhow::anyhow!("no"))).verdict, Verdict::Warn);
    assert_eq!(served(Ok(&HostStatus::default())).verdict, Verdict::Ok);
}
