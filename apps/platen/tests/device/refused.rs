//! Refused options, servers that do not answer, and their messages.

use super::{on_disk, output, platen, Served};
use rustix::process::{kill_process, Pid, Signal};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::time::{Duration, Instant};

#[test]
fn a_path_that_is_in_use_is_not_served() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |socket: &str, options: &[&str]| {
        let refused = output(&mut Served::command(folder.path(), socket, "judged", options));
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert_eq!(refused.status.code(), Some(1), "{said}");
        said
    };
    fs::write(folder.path().join("file"), "x").unwrap();
    let said = refused("file", &[]);
    assert!(said.contains("give a path that does not exist yet"), "{said}");
    // The control socket's own path, both ways of writing it.
    for socket in ["run/judged.sock", "run/../run/judged.sock"] {
        for options in [&[][..], &["--no-supervisor"]] {
            let said = refused(socket, options);
            assert!(said.contains("is the control socket of device judged"), "{said}");
        }
    }
}

#[test]
fn a_run_dir_in_which_others_could_replace_the_sockets_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    fs::create_dir(&run).unwrap();
    let refused = || {
        let refused = output(&mut Served::command(folder.path(), "s", "judged", &[]));
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert_eq!(refused.status.code(), Some(1), "{said}");
        assert!(fs::read_dir(&run).unwrap().next().is_none(), "{said}");
        said
    };
    fs::set_permissions(&run, fs::Permissions::from_mode(0o770)).unwrap();
    let said = refused();
    assert!(said.contains(&format!("other users may write to {}", run.display())), "{said}");
    fs::set_permissions(&run, fs::Permissions::from_mode(0o700)).unwrap();
    // Only root can give it away.
    if std::os::unix::fs::chown(&run, Some(65_534), None).is_ok() {
        let said = refused();
        let belongs = format!("{} belongs to user 65534, and this is user 0", run.display());
        assert!(said.contains(&belongs), "{said}");
    }
}

/// As `ulimit -f` and `LimitFSIZE=` have it: the store is a file, and the kernel's signal would end
/// the process.
#[test]
fn a_limit_on_the_size_of_files_is_an_error_with_a_name() {
    let folder = tempfile::tempdir().unwrap();
    let serve = Served::command(folder.path(), "s", "judged", &[]);
    let mut shell = Command::new("sh");
    shell.args(["-c", "ulimit -f 100; exec \"$@\"", "sh"]).arg(serve.get_program());
    let refused = output(shell.args(serve.get_args()));
    let said = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1), "{}: {said}", refused.status);
    assert!(said.contains("cannot create the store") && said.contains("File too large"), "{said}");
}

#[test]
fn files_of_a_device_that_is_not_served_are_removed() {
    let folder = on_disk();
    let (policy, backing) = (folder.path().join("policy.toml"), folder.path().join("backing"));
    let refused = |keys: &str, options: &[&str]| {
        let section = format!("[policy]\nbacking_dev = {backing:?}\nbacking_free = 0\n{keys}\n");
        fs::write(&policy, section).unwrap();
        let options = [&["--policy", policy.to_str().unwrap()], options].concat();
        let refused = output(&mut Served::command(folder.path(), "s", "judged", &options));
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert_eq!(refused.status.code(), Some(1), "{said}");
        said
    };
    for options in [&[][..], &["--no-supervisor"]] {
        let said = refused("", options);
        assert!(said.contains("backing_size = 0: say how many bytes"), "{said}");
        assert!(!backing.exists(), "{said}");
        let said = refused("backing_size = 9223372036854775807", options);
        assert!(said.contains("backing_size = 9223372036854775807"), "{said}");
        assert!(!backing.exists(), "{said}");
        // A later step fails, here because of a mount point that does not exist.
        let folder = folder.path().to_str().unwrap();
        let said = refused("backing_size = 1048576", &[options, &["--fuse", folder]].concat());
        assert!(said.contains("is no regular file"), "{said}");
        assert!(!backing.exists(), "{said}");
    }
    // A file that was there before belongs to a user, and stays.
    fs::write(&backing, "").unwrap();
    refused("", &[]);
    assert!(backing.exists());
}

#[test]
fn a_key_without_effect_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let policy = folder.path().join("policy.toml");
    fs::write(&policy, "[policy]\nwriteback_limit = 7\n").unwrap();
    let served = Served::new(&["--policy", policy.to_str().unwrap()]);
    let log = served.end();
    assert!(log.contains("policy: writeback_limit has no effect without backing_dev"), "{log}");
}

/// A server that was stopped, and one that was killed: each ends `stat` soon, with a word and not
/// with success.
#[test]
fn a_client_of_a_device_that_does_not_answer_gets_an_error() {
    let served = Served::new(&["--no-supervisor"]);
    let pid = Pid::from_child(&served.child);
    let ask = |words: &[&str]| {
        let mut command = platen();
        command.arg("device").args(words).arg("--run-dir").arg(served.path("run"));
        let done = output(&mut command);
        (done.status.code(), String::from_utf8_lossy(&done.stderr).into_owned())
    };
    kill_process(pid, Signal::STOP).unwrap();
    // A thread that waits for a CPU when the signal comes would still answer.
    let start = Instant::now();
    let stopped = |stat: String| stat.rsplit_once(") ").is_some_and(|(_, of)| of.starts_with('T'));
    let tasks = || fs::read_dir(format!("/proc/{}/task", served.child.id())).unwrap().flatten();
    let stat = |task: fs::DirEntry| fs::read_to_string(task.path().join("stat"));
    while !tasks().all(|task| stat(task).is_ok_and(stopped)) {
        assert!(start.elapsed() < Duration::from_secs(300), "it does not stop");
        std::thread::sleep(Duration::from_millis(5));
    }
    for words in [&["stat", "judged"][..], &["stat"], &["writeback", "judged", "huge"]] {
        let (code, said) = ask(words);
        assert!(said.contains("device judged: it does not answer within 5 s"), "{words:?}: {said}");
        assert_eq!(code, Some(1), "{words:?}: {said}");
    }
    kill_process(pid, Signal::KILL).unwrap();
    let start = Instant::now();
    loop {
        let (code, said) = ask(&["stat", "judged"]);
        assert_eq!(code, Some(1), "{said}");
        if said.contains("it is not served: no process listens on") {
            break;
        }
        assert!(start.elapsed() < Duration::from_secs(300), "{said}");
    }
    let (_, said) = ask(&["stat", "nobody"]);
    assert!(said.contains("device nobody: it is not served: there is no"), "{said}");
}

/// The error names the object for which there are too few descriptors.
#[test]
fn too_few_descriptors_are_reported_with_their_purpose() {
    let folder = tempfile::tempdir().unwrap();
    for limit in 4..9 {
        let serve = Served::command(folder.path(), "s", "judged", &[]);
        let mut shell = Command::new("sh");
        shell.args(["-c", &format!("ulimit -n {limit}; exec \"$@\""), "sh"]);
        let refused = output(shell.arg(serve.get_program()).args(serve.get_args()));
        let said = String::from_utf8_lossy(&refused.stderr);
        assert_eq!(refused.status.code(), Some(1), "{limit}: {said}");
        assert!(said.contains("os error 24"), "{limit}: {said}");
        assert!(!said.contains("platen: Too many open files"), "{limit}: {said}");
    }
}
