//! `platen host add` and `platen host join`: a host gets its certificate, and then VMs.

#[path = "host/rig.rs"]
mod rig;

use rig::{migrates, until, Rig, A, B, WATCHDOG};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Stdio};

/// `platen host add b`, at a port of its own.
fn add(rig: &Rig, words: &[&str]) -> Child {
    let (ca, config) = (rig.at("ca"), rig.config());
    let address = rig.address(A).to_string();
    Command::new(env!("CARGO_BIN_EXE_platen"))
        .args(["host", "add", "b", "--dir", ca.to_str().unwrap(), "--config", &config])
        .args(["--address", &address, "--port", &port().to_string()])
        .args(words)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// A port of this test program: it waits at all addresses.
fn port() -> u16 {
    static NEXT: std::sync::atomic::AtomicU16 = std::sync::atomic::AtomicU16::new(0);
    let next = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let process = u16::try_from(std::process::id() % 1000).unwrap();
    20_000 + process * 8 + next
}

/// B's service takes its certificate from the folder `new`.
fn take_the_new_ones(rig: &Rig) {
    let (old, new) = (rig.at("ca/a"), rig.at("new/tls"));
    rig.configure(B, |text| text.replace(&old.display().to_string(), &new.display().to_string()));
}

#[test]
fn a_first_host_makes_the_ca_and_its_own_certificate_by_one_command() {
    let rig = Rig::new("");
    let (ca, tls) = (rig.at("new/ca"), rig.at("new/tls"));
    let config = rig.at("new.toml");
    let text = std::fs::read_to_string(rig.config()).unwrap();
    let line = text.lines().find(|line| line.starts_with("tls_dir")).unwrap();
    let text = text.replace(line, &format!("tls_dir = \"{}\"", tls.display()));
    std::fs::write(&config, text).unwrap();
    let init = |name: &str| {
        let (config, ca) = (config.to_str().unwrap(), ca.to_str().unwrap());
        rig::run(&["host", "init", "--name", name, "--config", config, "--dir", ca])
    };
    let (code, said) = init("c");
    assert_eq!((code, said.contains("'c'"), ca.exists()), (Some(1), true, false), "{said}");
    let (code, said) = init("a");
    assert_eq!(code, Some(0), "{said}");
    // Its key is where the service reads it, and nowhere else.
    let mode = |name: &str| tls.join(name).metadata().unwrap().permissions().mode();
    assert_eq!(mode("key.pem") & 0o037, 0);
    assert!(ca.join("ca-key.pem").exists() && !ca.join("a").exists());
    let issued = std::fs::read_to_string(ca.join("issued")).unwrap();
    let fingerprint = issued.split(' ').nth(1).unwrap();
    assert!(said.contains(fingerprint), "{said}");
    let file = |name: &str| tls.join(name);
    let files = [file("ca.pem"), file("cert.pem"), file("key.pem")];
    let key = std::fs::read(&files[2]).unwrap();
    let credentials = tls::Credentials::load(&files[0], &files[1], &files[2]).unwrap();
    assert!(credentials.names().contains(&"a".to_owned()), "{:?}", credentials.names());
    // Nothing is replaced.
    let (code, said) = init("a");
    assert_eq!((code, said.contains("key.pem exists")), (Some(1), true), "{said}");
    let authority = std::fs::read(&files[0]).unwrap();
    std::fs::remove_dir_all(&tls).unwrap();
    std::fs::create_dir(ca.join("a")).unwrap();
    let (code, said) = init("a");
    assert_eq!((code, said.contains("has this host's files")), (Some(1), true), "{said}");
    // The CA of the other hosts stays.
    std::fs::remove_dir(ca.join("a")).unwrap();
    let (code, said) = init("a");
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(std::fs::read(&files[0]).unwrap(), authority);
    assert_ne!(std::fs::read(&files[2]).unwrap(), key);
}

#[test]
fn a_host_joins_by_a_token_once_and_then_vms_move() {
    let rig = Rig::new("");
    let mut adding = add(&rig, &[]);
    let mut said = BufReader::new(adding.stdout.take().unwrap()).lines();
    let address = said.find_map(|line| {
        let line = line.unwrap();
        line.trim().strip_prefix("platen host join ").map(str::to_owned)
    });
    let address = address.expect("a command for the other host");
    let token = said.by_ref().map(|line| line.unwrap().trim().to_owned()).nth(1).expect("a token");
    // Every user of the other host could read it there.
    assert!(token.len() == 96 && !address.contains(&token), "{address} {token}");
    let words = [address.as_str(), token.as_str()];
    let (tls, config) = (rig.at("new/tls"), rig.at("new/platen.toml"));
    let own = ["--tls-dir", tls.to_str().unwrap(), "--config", config.to_str().unwrap()];
    let join = |words: &[&str]| rig::run(&[&["host", "join"], words, &own].concat());
    // Another secret, and the hash of another CA.
    let flipped = |at: usize| {
        let mut token = words[1].to_owned();
        let digit = if &token[at..=at] == "0" { "1" } else { "0" };
        token.replace_range(at..=at, digit);
        token
    };
    for (token, why) in [
        (flipped(0), "the secret of the token is wrong"),
        (flipped(40), "is not the host of this token's CA"),
    ] {
        let (code, said) = join(&[words[0], &token]);
        assert_eq!((code, said.contains(why)), (Some(1), true), "{said}");
    }
    assert!(!tls.exists(), "a refusal leaves nothing behind");
    let (code, joined) = join(&words);
    assert_eq!(code, Some(0), "{joined}");
    assert!(adding.wait().unwrap().success());
    assert!(said.any(|line| line.unwrap() == "b has joined"));
    // The key is for its owner (and the service's group), and was never at the CA.
    let mode = |name: &str| tls.join(name).metadata().unwrap().permissions().mode();
    assert_eq!(mode("key.pem") & 0o037, 0);
    assert!(!rig.at("ca/b").exists());
    let written = std::fs::read_to_string(&config).unwrap();
    assert_eq!(written, std::fs::read_to_string(rig.config()).unwrap());
    // The token was used up, and nothing is overwritten unasked.
    let (code, said) = join(&words);
    assert_eq!((code, said.contains("--force")), (Some(1), true), "{said}");
    let (code, said) = join(&[&words[..], &["--force"]].concat());
    assert_eq!((code, said.contains("cannot connect")), (Some(1), true), "{said}");

    take_the_new_ones(&rig);
    let _services = (rig.start(A), rig.start(B));
    migrates(&rig, A, 49152);
    until(|| rig::status_of(&rig.status(B), "completed") == 1);
}

/// An `ssh` that runs the command here.
#[test]
fn a_host_joins_by_ssh_and_its_configuration_is_not_replaced() {
    let rig = Rig::new("");
    let (tls, config) = (rig.at("new/tls"), rig.at("new/platen.toml"));
    std::fs::create_dir(rig.at("new")).unwrap();
    let mine = std::fs::read_to_string(rig.config()).unwrap() + "# mine\n";
    std::fs::write(&config, &mine).unwrap();
    let script = format!(
        "#!/bin/sh\n[ \"$1 $2 $3\" = \"root@b -- platen\" ] || exit 9\nshift 3\n\
         exec {} \"$@\" --tls-dir {} --config {}\n",
        env!("CARGO_BIN_EXE_platen"),
        tls.display(),
        config.display()
    );
    let folder = rig.at("bin");
    std::fs::create_dir(&folder).unwrap();
    let ssh = folder.join("ssh");
    // Written by another process: one that another test is starting would have a copy of a file
    // that is open for writing here, and the kernel does not execute such a file.
    let make = ["-c", "printf %s \"$1\" >\"$0\" && chmod 755 \"$0\""];
    let made = Command::new("sh").args(make).arg(&ssh).arg(script).status().unwrap();
    assert!(made.success());
    let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap());
    let (ca, common) = (rig.at("ca"), rig.config());
    let by_ssh = |to: &str| {
        let out = Command::new(env!("CARGO_BIN_EXE_platen"))
            .args(["host", "add", "b", "--dir", ca.to_str().unwrap(), "--config", &common])
            .args(["--address", "127.0.0.1", "--port", &port().to_string(), &format!("--ssh={to}")])
            .env("PATH", &path)
            .output()
            .unwrap();
        let said = [out.stdout, out.stderr].concat();
        (out.status.code(), String::from_utf8(said).unwrap())
    };
    let begun = std::time::Instant::now();
    let (code, said) = by_ssh("root@wrong");
    assert_eq!((code, said.contains("by ssh failed")), (Some(1), true), "{said}");
    assert!(begun.elapsed() < WATCHDOG, "an ssh that fails is not waited for");
    let (code, said) = by_ssh("-oProxyCommand=true");
    assert_eq!((code, said.contains("is no USER@HOST")), (Some(1), true), "{said}");
    let (code, said) = by_ssh("root@b");
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("b has joined") && said.contains("differs from"), "{said}");
    assert_eq!(std::fs::read_to_string(&config).unwrap(), mine);
    take_the_new_ones(&rig);
    let _services = (rig.start(A), rig.start(B));
    migrates(&rig, B, 49152);
    until(|| rig::status_of(&rig.status(A), "completed") == 1);
}
