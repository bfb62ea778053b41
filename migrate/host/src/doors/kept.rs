//! The listening sockets of doors that carriers have: a door that is made at such an address gets
//! the carrier's socket, because it cannot open another.

use super::{Door, Doorkeeper, Doors, Gate, Kept, MAX_WAITING};
use crate::entrance::reset;
use std::collections::{HashMap, HashSet};

impl Doors {
    /// Gives these sockets to the doors at their addresses that are not open. The name may differ:
    /// the host was renamed. Keeps the sockets to whose addresses there are no doors.
    pub(super) fn reuse(&mut self, sockets: Vec<Kept>) {
        if sockets.is_empty() {
            return;
        }
        let numbers = self.doors.iter().enumerate().map(|(nth, it)| (it.address.clone(), nth));
        let numbers: HashMap<_, _> = numbers.collect();
        for kept in sockets {
            match numbers.get(&kept.address).map(|nth| &mut self.doors[*nth]) {
                Some(gate) if gate.listener.is_none() => {
                    gate.former = (gate.door != kept.door).then_some(kept.door);
                    (gate.listener, gate.again) = (Some(kept.listener), None);
                    gate.admit(&self.allowed);
                }
                Some(_) => {}
                None => self.kept.push(kept),
            }
        }
    }

    /// Forgets the sockets and former names that no carrier has any more. Where a carrier does not
    /// accept any more, resets the connections that wait: they would wait for as long as it lives.
    pub(super) fn tend_kept(&mut self, lent: &HashSet<Door>, keeper: &mut impl Doorkeeper) {
        if self.kept.is_empty() && self.doors.iter().all(|gate| gate.former.is_none()) {
            return;
        }
        let held = keeper.held();
        for gate in &mut self.doors {
            gate.former.take_if(|former| !held.contains(former));
        }
        self.kept.retain(|kept| held.contains(&kept.door));
        for kept in self.kept.iter().filter(|kept| !lent.contains(&kept.door)) {
            for _ in 0..MAX_WAITING {
                let Ok(socket) = kept.listener.accept() else { break };
                reset(socket);
                keeper.refused(&kept.door, "the configuration has no such door any more");
            }
        }
    }
}

impl Gate {
    /// Whether a carrier alone accepts at this door, by its present or its former name.
    pub(super) fn is_lent(&self, lent: &HashSet<Door>) -> bool {
        [Some(&self.door), self.former.as_ref()].into_iter().flatten().any(|it| lent.contains(it))
    }
}
