//! How many migrations may run on this host.

use host::{Record, Role};

/// Largest number of carriers at a time. It includes those whose migration is over and whose source
/// may still ask about it.
const MOST: usize = 512;
/// Places that only migrations that leave this host have: no other host can keep its VMs here.
const FOR_SOURCES: usize = MOST / 4;
/// The most migrations and disks of one other host that come to this one: it cannot keep those of
/// the others out.
const OF_A_HOST: usize = MOST / 4;

/// Whether a migration may run beside these.
///
/// # Errors
/// As many as may run; the message is for the user.
pub(super) fn for_another(running: &[Record], role: Role, peer: &str) -> Result<(), String> {
    let count = running.len();
    if count >= MOST {
        return Err(format!("{count} migrations run or end here, as many as may"));
    }
    if role == Role::Source {
        return Ok(());
    }
    let coming = || running.iter().filter(|record| record.role == Role::Destination);
    let (of_all, of_host) = (coming().count(), coming().filter(|it| it.peer == peer).count());
    if of_host >= OF_A_HOST {
        return Err(format!(
            "{of_host} migrations and disks of {peer} run or end here, as many as may"
        ));
    }
    if of_all >= MOST - FOR_SOURCES {
        return Err(format!("{of_all} migrations that come here run or end, as many as may"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use host::What;

    #[test]
    fn no_host_takes_the_places_of_the_others_nor_those_of_migrations_that_leave() {
        let mut running = Vec::new();
        let fill = |running: &mut Vec<Record>, role, peer: &str| loop {
            if let Err(why) = for_another(running, role, peer) {
                return why;
            }
            assert!(running.len() < MOST, "{peer} has taken every place");
            let (peer, what) = (peer.to_owned(), What::Disk);
            running.push(Record { role, peer, what, ..Record::default() });
        };
        let why = fill(&mut running, Role::Destination, "b");
        assert_eq!(why, "128 migrations and disks of b run or end here, as many as may");
        for_another(&running, Role::Destination, "c").unwrap();
        for peer in ["c", "d"] {
            fill(&mut running, Role::Destination, peer);
        }
        let why = for_another(&running, Role::Destination, "e").unwrap_err();
        assert_eq!(why, "384 migrations that come here run or end, as many as may");
        // Also to that host.
        for_another(&running, Role::Source, "b").unwrap();
        let full = fill(&mut running, Role::Source, "b");
        assert_eq!(full, "512 migrations run or end here, as many as may");
    }
}
