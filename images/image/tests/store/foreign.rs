//! Files that any user may put into a folder that all users share, such as `/tmp`.

use std::fs::File;
use std::os::unix::fs::symlink;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use image::{Damage, Store, WriteError, STORE_FILE};
use rustix::fs::{mkfifoat, Mode, CWD};

/// Each command that is given an image looks for the store's file beside it.
#[test]
fn a_pipe_or_a_device_in_the_place_of_the_stores_file_is_refused_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(STORE_FILE);
    let refused = || {
        let (sender, opened) = channel();
        let of = folder.path().to_owned();
        thread::spawn(move || sender.send(Store::open(&of).map(|_| ())));
        let error = opened.recv_timeout(Duration::from_secs(300)).unwrap().unwrap_err();
        let WriteError::Store { source: Damage::Store, .. } = error else { panic!("{error}") };
        std::fs::remove_file(&path).unwrap();
    };
    mkfifoat(CWD, &path, Mode::RUSR | Mode::WUSR).unwrap();
    refused();
    symlink("/dev/zero", &path).unwrap();
    refused();
    // No memory for all of it is allocated.
    File::create(&path).unwrap().set_len(1 << 40).unwrap();
    refused();
}
