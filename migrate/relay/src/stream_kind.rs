//! The kind of a stream, as the flags of its OPEN frame state it (W7).

use stream::Kind;

const MAIN: u8 = 0;
const MULTIFD: u8 = 1;
const OTHER: u8 = 2;
const PREEMPT: u8 = 3;
const RECOVERY: u8 = 4;
/// An NBD connection (W35), which is no stream of a migration.
pub(crate) const NBD: u8 = 5;

/// The flags for `kind`.
pub(crate) fn to_flags(kind: Kind) -> u8 {
    match kind {
        Kind::Main => MAIN,
        Kind::Multifd => MULTIFD,
        Kind::Other => OTHER,
        Kind::Preempt => PREEMPT,
        Kind::Recovery => RECOVERY,
    }
}

/// The kind for `flags`.
pub(crate) fn of_flags(flags: u8) -> Kind {
    match flags {
        MAIN => Kind::Main,
        MULTIFD => Kind::Multifd,
        PREEMPT => Kind::Preempt,
        RECOVERY => Kind::Recovery,
        _ => Kind::Other,
    }
}
