//! The owner of a device's ublk disk: its supervisor, and all servers of that, one after the other.
//!
//! A supervisor draws the owner's number, and servers get it in a variable of the environment,
//! where it survives `execve` and the supervisor's death. Other versions of the program do not look
//! at it, so the hand-over to them stays as it is.

use std::hash::{BuildHasher, RandomState};
use std::os::unix::process::parent_id;
use ublk::Owner;

const VARIABLE: &str = "PLATEN_UBLK_OWNER";

/// The word behind the number of an owner whose disk may have no mark.
const UNMARKED: &str = "unmarked";

/// The owner of the disk of a new device.
pub(super) fn new() -> Owner {
    // Seeded by the kernel's random numbers.
    let drawn = RandomState::new().hash_one(std::process::id()).to_le_bytes();
    Owner { number: u32::from_le_bytes([drawn[0], drawn[1], drawn[2], drawn[3]]), unmarked: false }
}

/// The owner of the disk that this process supervises, and will hand on to servers. `adopted` tells
/// that this process was the supervisor before `execve`. Must be called while there is one thread.
pub(super) fn of_supervisor(adopted: bool) -> Owner {
    let owner =
        if adopted { handed_on().unwrap_or_else(|| earlier(std::process::id())) } else { new() };
    std::env::set_var(VARIABLE, text(&owner));
    owner
}

/// The owner of the disk that this server has from its supervisor. Call it before the supervisor
/// may have died.
pub(super) fn of_server() -> Owner {
    handed_on().unwrap_or_else(|| earlier(parent_id()))
}

/// The owner that an earlier version has in a supervisor of this number.
fn earlier(supervisor: u32) -> Owner {
    Owner { number: supervisor, unmarked: true }
}

fn handed_on() -> Option<Owner> {
    parsed(&std::env::var(VARIABLE).ok()?)
}

fn text(owner: &Owner) -> String {
    match owner.unmarked {
        true => format!("{} {UNMARKED}", owner.number),
        false => owner.number.to_string(),
    }
}

fn parsed(text: &str) -> Option<Owner> {
    let (number, unmarked) = match text.split_once(' ') {
        Some((number, UNMARKED)) => (number, true),
        Some(_) => return None,
        None => (text, false),
    };
    Some(Owner { number: number.parse().ok()?, unmarked })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_is_handed_on_as_it_is() {
        for owner in [new(), earlier(4711), Owner { number: u32::MAX, unmarked: false }] {
            assert_eq!(parsed(&text(&owner)), Some(owner));
        }
        for other in ["", "-1", "7 marked", "4294967296", "unmarked"] {
            assert_eq!(parsed(other), None, "{other}");
        }
        // Two devices share one number once in 2^32.
        assert!((0..3).any(|_| new() != new()));
    }
}
