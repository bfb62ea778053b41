//! platen under the name of zstd or gzip, before the programs of these names.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

const NAMES: [&str; 2] = ["zstd", "gzip"];

/// A folder with links to this program, as a package has.
fn links() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in NAMES {
        symlink(env!("CARGO_BIN_EXE_platen"), folder.path().join(name)).unwrap();
    }
    folder
}

/// The usual program, which `scripts/setup` installs.
fn usual(name: &str) -> PathBuf {
    let path = PathBuf::from("/usr/bin").join(name);
    assert!(path.exists(), "{} is missing: run scripts/setup", path.display());
    path
}

fn plain() -> Vec<u8> {
    let mut plain = vec![0; 3 << 20];
    (0..400_000).for_each(|line| writeln!(plain, "line {line} of a text").unwrap());
    plain
}

fn piped(program: &Path, arguments: &[&str], input: &[u8]) -> Output {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    std::thread::scope(|scope| {
        // The program may end before it has read everything.
        scope.spawn(move || drop(stdin.write_all(input)));
        child.wait_with_output().unwrap()
    })
}

#[test]
fn zstd_and_gzip_read_its_streams_and_it_reads_theirs() {
    let (folder, plain) = (links(), plain());
    for name in NAMES {
        let (ours, usual) = (folder.path().join(name), usual(name));
        // As libvirt calls them.
        let packed = piped(&ours, &["-c"], &plain);
        assert!(packed.status.success() && packed.stderr.is_empty(), "{packed:?}");
        assert!(piped(&usual, &["-dc"], &packed.stdout).stdout == plain, "{name} reads ours");
        assert!(piped(&ours, &["-dc"], &packed.stdout).stdout == plain, "{name}: ours");
        let theirs = piped(&usual, &["-c"], &plain);
        let unpacked = piped(&ours, &["-dc"], &theirs.stdout);
        assert!(unpacked.status.success() && unpacked.stdout == plain, "{name}: theirs");

        let cut = piped(&ours, &["-dc"], &packed.stdout[..packed.stdout.len() - 9]);
        let said = String::from_utf8(cut.stderr).unwrap();
        assert!(!cut.status.success() && plain.starts_with(&cut.stdout), "{said}");
        assert!(said.contains("frame ") && said.contains(name), "{said}");
    }
}

#[test]
fn other_uses_run_the_usual_program() {
    let folder = links();
    let file = folder.path().join("text");
    std::fs::write(&file, "text").unwrap();
    for (name, suffix) in [("zstd", "zst"), ("gzip", "gz")] {
        let path = format!("{}:/usr/bin", folder.path().display());
        let run = |arguments: &[&str], path: &str| {
            let mut command = Command::new(folder.path().join(name));
            command.args(arguments).arg(&file).env("PATH", path).stdin(Stdio::null());
            command.output().unwrap()
        };
        assert!(run(&["-k"], &path).status.success());
        assert!(file.with_extension(suffix).exists());
        let alone = run(&["-k"], &folder.path().display().to_string());
        let said = String::from_utf8(alone.stderr).unwrap();
        assert!(!alone.status.success() && said.contains("PATH has no other"), "{said}");
    }
}

/// Under force both programs pass such bytes on.
#[test]
fn other_uses_pass_on_what_is_not_compressed() {
    let folder = links();
    let file = folder.path().join("plain");
    std::fs::write(&file, "no compressed text").unwrap();
    for name in NAMES {
        let path = format!("{}:/usr/bin", folder.path().display());
        let mut command = Command::new(folder.path().join(name));
        command.arg("-cdf").env("PATH", path).stdin(File::open(&file).unwrap());
        let usual = command.output().unwrap();
        assert!(usual.status.success() && usual.stdout == b"no compressed text", "{usual:?}");
    }
}

/// Each copy is another file, and runs the next program of its name.
#[test]
fn two_copies_in_path_do_not_run_each_other_for_ever() {
    let folder = tempfile::tempdir().unwrap();
    let places = ["one", "two"].map(|name| folder.path().join(name));
    for place in &places {
        std::fs::create_dir(place).unwrap();
        std::fs::copy(env!("CARGO_BIN_EXE_platen"), place.join("zstd")).unwrap();
    }
    let run = |nth: usize, path: &str| {
        // With unlimited time the two would go on for ever.
        let mut command = Command::new("/usr/bin/timeout");
        command.arg("300").arg(places[nth].join("zstd")).arg("--version").env("PATH", path);
        command.stdin(Stdio::null()).output().unwrap()
    };
    let copies = places.each_ref().map(|place| place.display().to_string()).join(":");
    for nth in 0..2 {
        let usual = run(nth, &format!("{copies}:/usr/bin"));
        assert!(String::from_utf8_lossy(&usual.stdout).contains("Zstandard"), "{usual:?}");
        let usual = run(nth, &format!("/usr/bin:{copies}"));
        assert!(String::from_utf8_lossy(&usual.stdout).contains("Zstandard"), "{usual:?}");
        let alone = run(nth, &format!("{copies}:/none"));
        let said = String::from_utf8_lossy(&alone.stderr);
        assert!(!alone.status.success() && said.contains("PATH has no other"), "{said}");
    }
}

#[test]
fn a_full_disk_and_a_reader_that_has_gone_are_failures() {
    let (folder, plain) = (links(), plain());
    for name in NAMES {
        for to in ["/dev/full", "|"] {
            let mut command = Command::new(folder.path().join(name));
            command.arg("-c").stdin(Stdio::piped()).stderr(Stdio::piped());
            let stdout = match to {
                "|" => Stdio::from(std::io::pipe().unwrap().1),
                path => Stdio::from(File::options().write(true).open(path).unwrap()),
            };
            let mut child = command.stdout(stdout).spawn().unwrap();
            // The command still has a copy of its standard output.
            drop(command);
            let mut stdin = child.stdin.take().unwrap();
            let _ = stdin.write_all(&plain);
            drop(stdin);
            let output = child.wait_with_output().unwrap();
            let said = String::from_utf8(output.stderr).unwrap();
            assert!(!output.status.success() && said.contains("cannot write"), "{to}: {said}");
        }
    }
}
