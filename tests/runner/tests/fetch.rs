//! The fetch scripts, with an apt that makes its packages here. It leaves out what its list of
//! installed packages has, as the real one does.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const TOOLS: [(&str, &str); 3] = [
    ("apt-get", include_str!("fetch/apt-get")),
    ("apt-cache", include_str!("fetch/apt-cache")),
    ("dpkg-deb", include_str!("fetch/dpkg-deb")),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// A repository with the scripts alone, on a system that has every package installed.
struct System(tempfile::TempDir);

impl System {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        for of_it in ["bin", "scripts"] {
            fs::create_dir(folder.path().join(of_it)).unwrap();
        }
        for (name, text) in TOOLS {
            let tool = folder.path().join("bin").join(name);
            // Written by another process: a descriptor open for writing here would be inherited by
            // processes that other tests start at that moment, and the kernel does not execute a
            // file open for writing.
            let made = "printf %s \"$1\" > \"$2\" && chmod 755 \"$2\"";
            let made = Command::new("sh").args(["-c", made, "sh", text]).arg(&tool).status();
            assert!(made.unwrap().success());
        }
        for name in ["apt-private", "fetch-linux612"] {
            fs::copy(root().join("scripts").join(name), folder.path().join("scripts").join(name))
                .unwrap();
        }
        let installed = "Package: busybox-static\n\nPackage: redis-server\n";
        fs::write(folder.path().join("system"), installed).unwrap();
        Self(folder)
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// `fetch-linux612`, behind these words of another command.
    fn fetch(&self, before: &[&str], settings: &[(&str, &str)]) -> Output {
        let script = self.at("scripts/fetch-linux612").display().to_string();
        let words: Vec<&str> = before.iter().copied().chain(["sh", &script]).collect();
        let path = format!("{}:{}", self.at("bin").display(), std::env::var("PATH").unwrap());
        Command::new(words[0])
            .args(&words[1..])
            .env("PATH", path)
            .env("FETCH_TEST", self.0.path())
            .env_remove("APT_CONFIG")
            .env_remove("PLATEN_DEBIAN_MIRROR")
            .envs(settings.iter().copied())
            .output()
            .unwrap()
    }

    fn calls(&self) -> String {
        fs::read_to_string(self.at("calls")).unwrap_or_default()
    }
}

/// An archive that the made apt never asks.
const MIRROR: (&str, &str) = ("PLATEN_DEBIAN_MIRROR", "http://archive.invalid/debian");

/// Elsewhere the scripts say what is missing, and fetch nothing.
fn has_debians_keys() -> bool {
    let there = |name: &&str| Path::new("/usr/share/keyrings").join(name).exists();
    let found = ["debian-archive-keyring.gpg", "debian-archive-keyring.pgp"].iter().any(there);
    if !found {
        eprintln!("skipped: there is no key of Debian's archive here");
    }
    found
}

fn said(output: &Output) -> String {
    let both = [&output.stdout[..], &output.stderr].concat();
    String::from_utf8_lossy(&both).into_owned()
}

#[test]
fn packages_that_the_system_has_are_fetched_all_the_same() {
    if !has_debians_keys() {
        return;
    }
    let system = System::new();
    let fetched = system.fetch(&[], &[MIRROR]);
    assert!(fetched.status.success(), "{}", said(&fetched));
    let parts = system.at("target/linux612");
    for part in ["vmlinuz", "modules/kernel/drivers/block/nbd.ko", "root/usr/bin/redis-server"] {
        assert!(parts.join(part).exists(), "{part}: {}", said(&fetched));
    }
    assert!(system.calls().contains("busybox-static redis-server"), "{}", system.calls());
    // A second run does nothing.
    let calls = system.calls();
    assert!(system.fetch(&[], &[MIRROR]).status.success());
    assert_eq!(system.calls(), calls);
}

#[test]
fn a_package_that_cannot_be_had_is_named_and_nothing_is_left_of_the_attempt() {
    if !has_debians_keys() {
        return;
    }
    for missing in ["redis-server", "linux-image-6.12.9+bpo-amd64"] {
        let system = System::new();
        let failed = system.fetch(&[], &[MIRROR, ("FETCH_TEST_MISSING", missing)]);
        let said = said(&failed);
        assert_eq!(failed.status.code(), Some(1), "{said}");
        let names = format!("E: Unable to locate package {missing}");
        assert!(said.contains(&names) && said.contains("PLATEN_SKIP_SWAP=1"), "{said}");
        assert!(!said.to_lowercase().contains("backtrace"), "{said}");
        let parts = system.at("target/linux612");
        assert_eq!(fs::read_dir(&parts).unwrap().count(), 0, "{said}");
        assert!(system.fetch(&[], &[MIRROR]).status.success());
    }
}

#[test]
fn without_an_entry_of_debians_archive_nothing_is_fetched_and_that_is_said() {
    let system = System::new();
    // Debian's key is there, and an entry of an archive that is not Debian's.
    let hidden = "mount -t tmpfs none /etc/apt && mount -t tmpfs none /usr/share/keyrings && \
                  : >/usr/share/keyrings/debian-archive-keyring.gpg && \
                  echo 'deb http://archive.invalid/ubuntu noble main' >/etc/apt/sources.list && \
                  exec \"$@\"";
    let before = ["unshare", "--map-root-user", "--mount", "sh", "-c", hidden, "sh"];
    let allowed = Command::new("unshare").args(["--map-root-user", "--mount", "true"]).status();
    if !allowed.is_ok_and(|status| status.success()) {
        eprintln!("skipped: no namespace of mounts can be made here");
        return;
    }
    let failed = system.fetch(&before, &[]);
    let said = said(&failed);
    assert_eq!(failed.status.code(), Some(1), "{said}");
    assert!(said.contains("have no entry of Debian's main archive"), "{said}");
    assert!(said.contains("or set PLATEN_DEBIAN_MIRROR to its URL"), "{said}");
    assert_eq!(system.calls(), "");
}

/// Which archive a machine fetches from is its own affair.
#[test]
fn no_script_names_an_archive() {
    // This file alone names some, for the tests of its test.
    let here = root().join("tests/runner/tests/fetch.rs");
    let mut searched = 0;
    let folders = ["scripts", "docs", "tests", "packaging"].map(|name| root().join(name));
    let in_root = fs::read_dir(root()).unwrap().map(|entry| entry.unwrap().path());
    let in_root = in_root.filter(|path| path.is_file()).collect();
    for path in folders.iter().map(|folder| files(folder)).chain([in_root]).flatten() {
        let Ok(text) = fs::read_to_string(&path) else { continue };
        if path == here {
            continue;
        }
        searched += 1;
        for (nth, line) in (1..).zip(text.lines()) {
            let named = line.split("://").skip(1).any(is_archive);
            assert!(!named, "{}:{nth}: {line}", path.display());
        }
    }
    assert!(searched > 150, "{searched}");
}

/// All files in a folder and its folders, what is built there left out.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let (folders, mut files): (Vec<_>, Vec<_>) = entries.partition(|path| path.is_dir());
    let source = folders.iter().filter(|path| !path.ends_with("target"));
    files.extend(source.flat_map(|folder| self::files(folder)));
    files
}

/// Whether what follows `://` is the address of a packages' archive, or of a mirror of anything.
fn is_archive(rest: &str) -> bool {
    let address = rest.split([' ', '"', '\'', ')', '>', '`']).next().unwrap_or_default();
    let (host, path) = address.split_once('/').unwrap_or((address, ""));
    let first = path.split('/').next().unwrap_or_default();
    host.starts_with("deb.")
        || host.contains("mirror")
        || host.starts_with("archive.")
        || ["debian", "ubuntu"].contains(&first)
}

#[test]
fn an_archive_is_told_from_a_page() {
    for archive in ["deb.example.org/debian", "ftp.example.org/debian/ x", "a.mirror.org\""] {
        assert!(is_archive(archive), "{archive}");
    }
    for page in ["rustup.rs", "www.debian.org/doc/packaging-manuals/", "keepachangelog.com/en"] {
        assert!(!is_archive(page), "{page}");
    }
}
