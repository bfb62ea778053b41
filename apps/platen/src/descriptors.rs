//! The limit of open files.

use rustix::process::{getrlimit, setrlimit, Resource};

/// Raises the limit of descriptors as far as possible. The usual one, 1024, is for programs that
/// call `select`.
pub(crate) fn raise_descriptors() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    let _ = setrlimit(Resource::Nofile, limit);
}
