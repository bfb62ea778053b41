use super::*;
use rustix::net::{shutdown, Shutdown};
use std::process::Stdio;

#[test]
fn a_player_whose_disk_hangs_is_not_waited_for() {
    let (ours, theirs) = Channel::pair().unwrap();
    let mut command = Command::new("cat");
    let child = command.stdin(Stdio::piped()).stdout(theirs).spawn();
    drop(command);
    let mut child = child.unwrap();
    let input = child.stdin.take();
    let player = Player::over(0, ours, child).unwrap();
    assert!(!player.ends_within(Duration::from_millis(5)));
    drop(input);
    assert!(player.ends_within(Duration::from_secs(300)));
    assert_eq!(player.why_it_ended(), "the player ended with status 0");
    // Another one has to serve its VMs.
    let serve = Serve { vm: 0, socket: "none".into(), resume: false };
    assert!(player.serve(&serve, None).unwrap().is_none());
}

#[test]
fn events_reach_the_vm_that_they_are_of_until_the_player_ends() {
    let (ours, theirs) = Channel::pair().unwrap();
    // It repeats each command, which has the number of a VM as an event has.
    let mut command = Command::new("cat");
    let input = theirs.try_clone().unwrap();
    let child = command.stdin(input).stdout(theirs).spawn().unwrap();
    drop(command);
    let player = Player::over(0, ours, child).unwrap();
    let serve = |vm| Serve { vm, socket: format!("{vm}").into(), resume: false };
    let [one, two] = [1, 2].map(|vm| player.serve(&serve(vm), None).unwrap().unwrap());
    for (events, socket) in [(&two, "2"), (&one, "1")] {
        let event = events.recv_timeout(Duration::from_secs(300)).unwrap();
        assert_eq!(event["socket"], socket);
    }
    shutdown(&*player.channel, Shutdown::Write).unwrap();
    assert!(one.recv().is_err() && two.recv().is_err());
}

/// A player that has not got a command reports nothing, and its VM would wait for ever.
#[test]
fn a_command_that_cannot_be_sent_is_an_error_and_no_wait() {
    let (ours, theirs) = Channel::pair().unwrap();
    let mut command = Command::new("cat");
    let input = theirs.try_clone().unwrap();
    let child = command.stdin(input).stdout(theirs).spawn().unwrap();
    drop(command);
    let player = Player::over(0, ours, child).unwrap();
    let serve = Serve { vm: 1, socket: "x".repeat(1 << 20).into(), resume: false };
    let error = player.serve(&serve, None).expect_err("too long for a packet");
    assert!(format!("{error:#}").contains("limit"), "{error:#}");
    shutdown(&*player.channel, Shutdown::Write).unwrap();
}
