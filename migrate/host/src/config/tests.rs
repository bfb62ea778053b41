use super::*;

const TWO: &str = "[[host]]\nname = \"a\"\ndoor = \"127.80.0.1\"\nports = \"49152-49215\"\n\
                   [[host]]\nname = \"b.example\"\ndoor = \"127.80.0.2\"\nports = \"49216-49279\"\n\
                   address = \"fe80::2\"\n";

fn said(text: &str) -> String {
    Config::parse(text).unwrap_err().to_string()
}

#[test]
fn the_shortest_configuration_names_hosts_and_their_doors() {
    let config = Config::parse(TWO).unwrap();
    let b = config.find("b").unwrap();
    assert_eq!((b.name.as_str(), b.address_with(7)), ("b.example", "[fe80::2]:7".into()));
    assert_eq!(config.find("a.example").unwrap().address_with(7), "a:7");
    let error = config.find("c").unwrap_err().to_string();
    assert!(error.contains("'c'") && error.contains("a, b.example"), "{error}");
    // The service gives it to its carriers as JSON.
    let again: Config = serde_json::from_str(&serde_json::to_string(&config).unwrap()).unwrap();
    assert_eq!(again, config);
}

#[test]
fn a_short_name_that_two_hosts_share_is_none() {
    let text = TWO.replace("\"a\"", "\"b.org\"");
    assert!(Config::parse(&text).unwrap().find("b").is_err());
}

#[test]
fn what_cannot_be_meant_is_refused_with_its_key() {
    for (line, words) in [
        ("speed = 1", "speed"),
        ("port = 0", "port"),
        ("port = 49152", "`port`"),
        ("unreachable = \"maybe\"", "refuse"),
        ("links = 65", "1 to 64"),
        ("page_size = 1", "65536"),
        ("max_cpu = 0.0", "0.05"),
        ("resume_timeout = 3601", "3600"),
        ("setup_timeout = 0", "1 to 3600"),
        ("compress_threads = 0", "compress_threads"),
        ("revoked = [\"AA:BB\"]", "revoked: 'AA:BB' is no SHA-256"),
        ("run_dir = \"x\"", "absolute"),
        ("sockets = 65", "0 to 64"),
        ("socket_dir = \"x\"", "socket_dir: 'x' is not an absolute"),
        ("metrics = \"0.0.0.0:9464\"", "loopback"),
        ("metrics = \"127.0.0.1:0\"", "no port"),
        ("metrics = \"unix:x\"", "absolute"),
        ("metrics = \"9464\"", "unix:PATH"),
    ] {
        let error = said(&format!("{line}\n{TWO}"));
        assert!(error.contains(words), "{line}: {error}");
    }
    assert!(said("").contains("[[host]]"));
    let long = format!("sockets = 1\nsocket_dir = \"/{}\"\n{TWO}", "x".repeat(105));
    assert!(said(&long).contains("has a path of 110 bytes"), "{}", said(&long));
    for (from, to, words) in [
        ("127.80.0.1", "127.0.0.1", "other than"),
        ("127.80.0.1", "10.0.0.1", "loopback"),
        ("127.80.0.1", "127.80.0.2", "another host has 127.80.0.2"),
        ("\"a\"", "\"b.example\"", "name of host 'b.example': 'b.example' is the same as"),
        ("\"a\"", "\"B.example.\"", "the name or address of host 'B.example.'"),
        // Its certificate would be one for the other host, too.
        ("\"a\"", "\"fe80:0::2\"", "address of host 'b.example': 'fe80::2' is the same as"),
        ("\"fe80::2\"", "\"A\"", "address of host 'b.example': 'A' is the same as"),
        ("\"a\"", "\"\"", "1 to 255"),
        ("\"a\"", "\"x/y\"", "name of a folder"),
        ("\"a\"", "\"..\"", "name of a folder"),
        ("\"a\"", "\"h a\"", "it is neither a host name nor an IP address"),
        ("\"a\"", "\"\\u001b[31m\"", "it is neither a host name nor an IP address"),
        ("\"fe80::2\"", "\"no such\"", "'no such' is neither a host name nor an IP address"),
        ("49152-49215", "9-8", "49152-49215"),
        ("49152-49215", "0-8", "FIRST-LAST"),
        ("49152-49215", "1-4097", "4161 ports"),
        ("49152-49215", "49152-49216", "'a' has some of them"),
        (
            "49152-49215\"",
            "49152-49215\"\nintercept = \"100-200\"",
            "101 ports, and `ports` only 64",
        ),
        ("49152-49215\"", "49152-49215\"\nintercept = \"4440-4450\"", "4444 is `port`"),
        ("49152-49215\"", "49152-49215\"\nintercept = \"49270-49280\"", "host 'b.example'"),
    ] {
        let error = said(&TWO.replace(from, to));
        assert!(error.contains(words), "{to}: {error}");
    }
}
