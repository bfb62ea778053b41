//! A server of files that does not answer.

#![expect(unsafe_code, reason = "a filter of system calls that keeps them waiting")]

use super::*;

use rustix::event::{poll, PollFd, PollFlags};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule,
};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// The kernel's descriptor of calls that wait: they fail once it is closed.
pub(super) struct Hung {
    listener: OwnedFd,
}

impl Hung {
    /// Waits until a call waits.
    pub(super) fn wait(&self) -> bool {
        let mut waits = [PollFd::new(&self.listener, PollFlags::IN)];
        poll(&mut waits, Some(&LONG.try_into().unwrap())).unwrap();
        waits[0].revents().contains(PollFlags::IN)
    }

    /// Lets the call go on that waits.
    pub(super) fn pass(&self) {
        self.answer(|_| None);
    }

    /// Ends the call that waits with the errno that `decide` gives for its number, or lets it go
    /// on.
    pub(super) fn answer(&self, decide: impl FnOnce(i64) -> Option<i32>) {
        let call = self.take();
        self.end(&call, decide(call.data.nr.into()));
    }

    /// The oldest call that waits and was not taken yet.
    pub(super) fn take(&self) -> libc::seccomp_notif {
        self.receive().unwrap()
    }

    /// Ends a call with this errno, or lets it go on.
    pub(super) fn end(&self, call: &libc::seccomp_notif, errno: Option<i32>) {
        let goes_on = u32::try_from(libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE).unwrap();
        let (error, flags) = match errno {
            Some(errno) => (-errno, 0),
            None => (0, goes_on),
        };
        self.send(libc::seccomp_notif_resp { id: call.id, val: 0, error, flags }).unwrap();
    }

    /// Lets the calls go on until all processes have ended, except those for which `stops` is true,
    /// given the thread that calls. It has killed that thread's process.
    pub(super) fn pass_all(&self, mut stops: impl FnMut(i32) -> bool) {
        let goes_on = u32::try_from(libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE).unwrap();
        while self.wait() {
            // A process that was killed takes its call back.
            let Ok(call) = self.receive() else { continue };
            if !stops(i32::try_from(call.pid).unwrap()) {
                let flags = goes_on;
                let answer = libc::seccomp_notif_resp { id: call.id, val: 0, error: 0, flags };
                let _ = self.send(answer);
            }
        }
    }

    fn receive(&self) -> std::io::Result<libc::seccomp_notif> {
        const RECEIVE: libc::c_ulong = 0xc050_2100;
        // SAFETY: the struct has only numbers.
        let mut call: libc::seccomp_notif = unsafe { std::mem::zeroed() };
        // SAFETY: the kernel fills the struct, or fails.
        let received = unsafe { libc::ioctl(self.listener.as_raw_fd(), RECEIVE, &mut call) };
        (received == 0).then_some(call).ok_or_else(std::io::Error::last_os_error)
    }

    fn send(&self, mut answer: libc::seccomp_notif_resp) -> std::io::Result<()> {
        const SEND: libc::c_ulong = 0xc018_2101;
        // SAFETY: the kernel reads the struct.
        let sent = unsafe { libc::ioctl(self.listener.as_raw_fd(), SEND, &mut answer) };
        (sent == 0).then_some(()).ok_or_else(std::io::Error::last_os_error)
    }
}

/// Runs `work` on a thread for which, and for whose processes, each write of many bytes waits for
/// ever, as on a server of files that does not answer.
fn with_hung_disk<T: Send>(work: impl FnOnce() -> T + Send) -> (T, Hung) {
    const MANY: u64 = 3000;
    let many = SeccompCondition::new(2, SeccompCmpArgLen::Qword, SeccompCmpOp::Ge, MANY).unwrap();
    with_held(vec![(libc::SYS_write, vec![SeccompRule::new(vec![many]).unwrap()])], work)
}

/// Runs `work` on a thread for which, and for whose processes, the calls of these rules wait.
pub(super) fn with_held<T: Send>(
    rules: Vec<(i64, Vec<SeccompRule>)>,
    work: impl FnOnce() -> T + Send,
) -> (T, Hung) {
    /// `SECCOMP_RET_USER_NOTIF`, in the place of the errno below.
    const NOTIFY: u32 = 0x7fc0_0000;
    const EXAMPLE: u32 = 0x123;
    let here = std::env::consts::ARCH.try_into().unwrap();
    let rules = rules.into_iter().collect();
    let action = SeccompAction::Errno(EXAMPLE);
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, action, here).unwrap();
    let mut filter: BpfProgram = filter.try_into().unwrap();
    for instruction in &mut filter {
        if instruction.k == 0x5_0000 | EXAMPLE {
            instruction.k = NOTIFY;
        }
    }
    let filtered = || {
        let len = u16::try_from(filter.len()).unwrap();
        let program = libc::sock_fprog { len, filter: filter.as_mut_ptr().cast() };
        rustix::thread::set_no_new_privs(true).unwrap();
        // SAFETY: the kernel copies the program, whose length is that of the list.
        let listener = unsafe {
            libc::syscall(
                libc::SYS_seccomp,
                libc::SECCOMP_SET_MODE_FILTER,
                libc::SECCOMP_FILTER_FLAG_NEW_LISTENER,
                std::ptr::from_ref(&program),
            )
        };
        let listener = i32::try_from(listener).unwrap();
        assert!(listener >= 0, "{}", std::io::Error::last_os_error());
        // SAFETY: the kernel has just made this descriptor for this thread.
        let listener = unsafe { OwnedFd::from_raw_fd(listener) };
        (work(), Hung { listener })
    };
    thread::scope(|scope| scope.spawn(filtered).join().unwrap())
}

/// The VM is stopped while it is saved. An interrupt makes it continue, whatever the disk does.
#[test]
fn an_interrupt_lets_the_vm_go_on_although_the_disk_hangs() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some(source) = Qemu::start(folder, "source", &MACHINE) else { return };
    let cases = [
        &["--stop", "--then", "quit"][..],
        &["--live", "--then", "quit"],
        &["--live", "--then", "continue"],
        // QEMU keeps the VM from its memory until the pages are read.
        &["--snapshot"],
    ];
    for (nth, how) in cases.into_iter().enumerate() {
        let image = folder.join(format!("image{nth}"));
        let mut save = Command::new(env!("CARGO_BIN_EXE_platen"));
        save.arg("save").arg(&image).args(["--qmp", &source.address()]).args(how);
        save.args(["--compress-threads", "1"]).stderr(Stdio::null());
        let (mut save, hung) = with_hung_disk(|| save.spawn().unwrap());
        assert!(hung.wait(), "{how:?} does not write to the disk");
        let pid = rustix::process::Pid::from_child(&save);
        rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
        let mut monitor = Qmp::connect(&second_monitor(&source.socket), LONG).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let over = monitor.query_migrate().unwrap().is_over();
            if over && monitor.query_status().unwrap().running {
                break;
            }
            let said = monitor.execute("query-migrate", None).unwrap();
            if Instant::now() > deadline {
                save.kill().unwrap();
                let status = monitor.query_status().unwrap().status;
                panic!("{how:?}: the VM does not go on: {status}, {said}");
            }
            thread::sleep(Duration::from_millis(20));
        }
        drop(hung);
        assert!(!save.wait().unwrap().success());
        assert!(!image.exists(), "{how:?}");
    }
}

/// QEMU answers nothing during the switchover, while it writes pages to the save, which waits for
/// the disk.
#[test]
fn an_interrupt_ends_a_switchover_that_waits_for_the_disk() {
    for how in [&["--stop"][..], &["--stop", "--channels", "2"]] {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path();
        let Some(source) = filled(folder) else { return };
        let image = folder.join("image");
        let mut save = Command::new(env!("CARGO_BIN_EXE_platen"));
        save.arg("save").arg(&image).args(["--qmp", &source.address()]).args(how);
        save.args(["--compress-threads", "1"]).stderr(Stdio::piped());
        let (save, hung) = with_hung_disk(|| save.spawn().unwrap());
        // One write at a time: QEMU begins the switchover once it has sent pages for 100 ms.
        let mut monitor = Qmp::connect(&second_monitor(&source.socket), LONG).unwrap();
        while hung.wait() {
            match monitor.execute_within("query-status", None, Duration::from_secs(1)) {
                Err(qmp::QmpError::TimedOut { .. }) => break,
                status => assert_ne!(status.unwrap()["status"], json!("postmigrate"), "{how:?}"),
            }
            hung.pass();
            thread::sleep(Duration::from_millis(10));
        }
        let pid = rustix::process::Pid::from_child(&save);
        rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
        let ended = save.wait_with_output().unwrap();
        let said = said(&ended);
        // The command has seen the VM go on before it ended, and its sockets with it.
        assert!(said.contains("the VM is 'running'"), "{how:?}: {said}");
        assert!(!ended.status.success() && !image.exists(), "{how:?}: {said}");
    }
}

/// Starts a VM with bytes that do not compress in most of its RAM.
fn filled(folder: &Path) -> Option<Qemu> {
    let mut state = 1_u64;
    let bytes: Vec<u8> = std::iter::repeat_with(|| {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (state >> 56) as u8
    })
    .take(12 << 20)
    .collect();
    let filler = folder.join("filler");
    fs::write(&filler, bytes).unwrap();
    let loads = format!("loader,file={},addr=0x200000,force-raw=on", filler.display());
    Qemu::start(folder, "source", &[&MACHINE[..], &["-device", &loads]].concat())
}

/// A disk that takes no requests, but answers fsync: the call to write back never returns.
#[test]
fn a_save_does_not_wait_for_the_thread_that_writes_back() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some(source) = filled(folder) else { return };
    let image = folder.join("image").display().to_string();
    let mut save = Command::new(env!("CARGO_BIN_EXE_platen"));
    save.args(["save", &image, "--qmp", &source.address()]).stderr(Stdio::null());
    let calls = vec![(libc::SYS_sync_file_range, Vec::new())];
    let (mut save, hung) = with_held(calls, || save.spawn().unwrap());
    assert!(hung.wait(), "the image is not written back while it grows");
    assert!(save.wait().unwrap().success());
    // Only now: nothing has answered the call.
    drop(hung);
    works(folder, &["image", "verify", &image]);
}

/// A thread that waits for a disk survives SIGKILL. With the descriptors of its process it would
/// hold the connections to QEMU and to the helper process open: a stopped VM would stay stopped.
#[test]
fn threads_that_wait_for_the_disk_hold_the_image_alone() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some(source) = filled(folder) else { return };
    let image = folder.join("image").display().to_string();
    let mut save = Command::new(env!("CARGO_BIN_EXE_platen"));
    save.args(["save", &image, "--qmp", &source.address(), "--stop", "--then", "quit"]);
    save.stderr(Stdio::null());
    for call in [libc::SYS_sync_file_range, libc::SYS_fsync] {
        let (mut save, hung) = with_held(vec![(call, Vec::new())], || save.spawn().unwrap());
        assert!(hung.wait(), "the image is not written");
        let held: Vec<(String, usize)> = fs::read_dir(format!("/proc/{}/task", save.id()))
            .unwrap()
            .map(|task| {
                let task = task.unwrap().path();
                let name = fs::read_to_string(task.join("comm")).unwrap();
                (name.trim_end().to_owned(), fs::read_dir(task.join("fd")).unwrap().count())
            })
            .filter(|(name, _)| name == "writeback" || name == "fsync")
            .collect();
        assert!(!held.is_empty() && held.iter().all(|(_, fds)| *fds == 1), "{held:?}");
        save.kill().unwrap();
        save.wait().unwrap();
        drop(hung);
        let mut monitor = Qmp::connect(&second_monitor(&source.socket), LONG).unwrap();
        let deadline = Instant::now() + LONG;
        while !monitor.query_status().unwrap().running
            || !monitor.query_migrate().unwrap().is_over()
        {
            assert!(Instant::now() < deadline, "the VM does not go on");
            thread::sleep(Duration::from_millis(20));
        }
        assert!(!Path::new(&image).exists());
    }
}
