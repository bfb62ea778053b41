//! The VMs that leave a player whose disk does not answer, for a player of a copy of the image.
//!
//! No process can end while one of its threads waits in the kernel for a disk, and the others keep
//! its sockets open until then. So the player itself shuts down the connections, in both
//! directions: from then on QEMU gets no byte of it, whatever its threads do later, and QEMU waits
//! for another player, as if this one had died.

use crate::restore_player_link::lock;
use std::collections::HashMap;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Mutex;

/// Connections to the QEMUs that wait for another player if the connection ends, by VM.
#[derive(Debug, Default)]
pub(crate) struct Connections(Mutex<HashMap<usize, UnixStream>>);

impl Connections {
    /// Adds the connection of a VM that runs. It is open until [`Self::end`].
    pub(crate) fn add(&self, vm: usize, connection: UnixStream) {
        lock(&self.0).insert(vm, connection);
    }

    /// Closes this copy of a VM's connection, if there is one.
    pub(crate) fn end(&self, vm: usize) {
        lock(&self.0).remove(&vm);
    }

    /// Ends all connections, and then calls `left` for each VM.
    pub(crate) fn leave(&self, left: impl Fn(usize)) {
        let all = std::mem::take(&mut *lock(&self.0));
        for (vm, connection) in all {
            // An error shows that QEMU has closed it.
            let _ = connection.shutdown(Shutdown::Both);
            left(vm);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::io::{Read, Write};

    #[test]
    fn a_vm_that_has_left_gets_no_byte_of_the_player() {
        let connections = Connections::default();
        let pairs = [(); 2].map(|()| UnixStream::pair().unwrap());
        for (vm, (player, _)) in pairs.iter().enumerate() {
            connections.add(vm, player.try_clone().unwrap());
        }
        connections.end(1);
        let gone = RefCell::new(Vec::new());
        connections.leave(|vm| gone.borrow_mut().push(vm));
        connections.leave(|vm| gone.borrow_mut().push(vm));
        assert_eq!(*gone.borrow(), [0]);
        let [(mut left, mut qemu), (mut stays, mut other)] = pairs;
        assert!(left.write_all(b"page").is_err());
        assert_eq!(qemu.read(&mut [0; 4]).unwrap(), 0);
        stays.write_all(b"page").unwrap();
        assert_eq!(other.read(&mut [0; 4]).unwrap(), 4);
    }
}
