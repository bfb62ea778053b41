//! The users of `allow_users`, by their numbers.

use anyhow::Context;
use nix::errno::Errno;
use nix::unistd::User;

/// Finds the number of a user by the name; `None` if there is no such user.
pub(super) type LookUp<'a> = &'a dyn Fn(&str) -> nix::Result<Option<u32>>;

/// Asks the system.
pub(super) fn by_name(name: &str) -> nix::Result<Option<u32>> {
    match User::from_name(name) {
        // So some of the system's sources say that there is no such user (getpwnam_r(3)).
        Err(Errno::ENOENT | Errno::ESRCH | Errno::EBADF | Errno::EPERM) => Ok(None),
        found => Ok(found?.map(|user| user.uid.as_raw())),
    }
}

/// As [`by_name`]. A user who cannot be looked up counts as one who does not exist.
pub(super) fn by_name_if_possible(name: &str) -> nix::Result<Option<u32>> {
    Ok(by_name(name).unwrap_or(None))
}

/// Root and these users, in their order. Names that no user has are left out.
///
/// # Errors
/// A user cannot be looked up: a directory service (LDAP) may not run yet.
pub(super) fn numbers(names: &[String], look_up: LookUp<'_>) -> anyhow::Result<Vec<u32>> {
    let mut users = vec![0];
    for name in names {
        match name.parse() {
            Ok(number) => users.push(number),
            Err(_) => users.extend(
                look_up(name)
                    .with_context(|| format!("allow_users: cannot look up the user '{name}'"))?,
            ),
        }
    }
    users.sort_unstable();
    users.dedup();
    Ok(users)
}
