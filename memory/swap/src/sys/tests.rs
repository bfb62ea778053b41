use super::*;

/// Longer than anything here takes.
const LONG: Duration = Duration::from_secs(600);

fn pause() -> io::Result<()> {
    loop {
        // SAFETY: takes nothing.
        unsafe { libc::pause() };
    }
}

#[test]
fn a_child_s_error_its_death_and_its_delay_are_distinguished() {
    let later = || Instant::now() + LONG;
    in_child(later(), || Ok(())).unwrap();
    let error = in_child(later(), || Err(io::Error::from_raw_os_error(libc::ENOMEM)));
    assert_eq!(error.unwrap_err().raw_os_error(), Some(libc::ENOMEM));
    let killed = in_child(later(), || {
        let own = libc::pid_t::try_from(std::process::id()).unwrap_or(0);
        // SAFETY: takes numbers.
        unsafe { libc::kill(own, libc::SIGKILL) };
        pause()
    });
    assert_eq!(killed.unwrap_err().kind(), io::ErrorKind::OutOfMemory);
    let late = in_child(Instant::now() + Duration::from_millis(50), pause);
    assert_eq!(late.unwrap_err().kind(), io::ErrorKind::TimedOut);
}

#[test]
fn children_are_waited_for_where_sigchld_was_ignored() {
    let later = || Instant::now() + LONG;
    // In a process of its own: the tests share the disposition of a signal.
    let waited = |heed: bool| {
        in_child(later(), || {
            ignore(&[libc::SIGCHLD])?;
            if heed {
                heed_children()?;
            }
            in_child(later(), || Ok(()))
        })
    };
    assert_eq!(waited(false).unwrap_err().raw_os_error(), Some(libc::ECHILD));
    waited(true).unwrap();
}

/// In the environment of a process that is to fault.
const FAULTS: &str = "PLATEN_TEST_FAULTS";

/// A thread's alternate signal stack is memory that no stand-by server could prepare.
#[test]
fn a_process_started_with_faults_ignored_has_no_signal_stacks_and_ends_by_a_fault() {
    const NAME: &str = "sys::tests::a_process_started_with_faults_ignored_has_no_signal_stacks_and_ends_by_a_fault";
    if std::env::var_os(FAULTS).is_none() {
        ignore_faults().unwrap();
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", NAME, "--nocapture"]).env(FAULTS, "1");
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(said.contains("signal stack: false"), "{said}");
        let signal = std::os::unix::process::ExitStatusExt::signal(&output.status);
        assert_eq!(signal, Some(libc::SIGSEGV), "{said}");
        return;
    }
    let thread = std::thread::spawn(|| {
        let mut stack = std::mem::MaybeUninit::<libc::stack_t>::zeroed();
        // SAFETY: fills in `stack`.
        let known = unsafe { libc::sigaltstack(std::ptr::null(), stack.as_mut_ptr()) };
        // SAFETY: all bytes zero are a value of it, too.
        let stack = unsafe { stack.assume_init() };
        println!("signal stack: {}", known != 0 || stack.ss_flags & libc::SS_DISABLE == 0);
        let (flags, none) = (rustix::mm::MapFlags::PRIVATE, rustix::mm::ProtFlags::empty());
        // SAFETY: a new mapping.
        let page = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), 4096, none, flags) };
        // SAFETY: does not return: the page may not be read.
        unsafe { page.unwrap().cast::<u8>().read_volatile() }
    });
    thread.join().unwrap();
}

/// A helper that the supervisor kills must not go on in a child.
#[test]
fn a_child_ends_with_its_parent() {
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    // Only the two processes below have it: its end is seen when both are gone.
    let fd = theirs.as_raw_fd();
    let parent = in_child(Instant::now() + LONG, || {
        // SAFETY: the number of a socket that this process has as well.
        unsafe { libc::write(fd, c"x".as_ptr().cast(), 1) };
        let own = std::process::id();
        // SAFETY: the child makes system calls only.
        if unsafe { libc::fork() } == 0 {
            // An error: the parent has ended already.
            let _ = end_with_parent(own).and_then(|()| pause());
            // SAFETY: takes a number.
            unsafe { libc::_exit(0) }
        }
        Err(io::Error::from_raw_os_error(libc::EINTR))
    });
    assert_eq!(parent.unwrap_err().raw_os_error(), Some(libc::EINTR));
    drop(theirs);
    ours.set_read_timeout(Some(LONG)).unwrap();
    let mut bytes = Vec::new();
    io::Read::read_to_end(&mut &ours, &mut bytes).unwrap();
    assert_eq!(bytes, b"x");
}
