//! The calls to the destination of a migration.

use std::time::Duration;

use crate::connection::{CAPABILITIES, FINISH, PREPARE, STATE};
use crate::xdr::Arguments;
use crate::xml::visit;
use crate::{Connection, Domain, LibvirtError};

/// Flags of a migration.
const LIVE: u32 = 1;
const PAUSED: u32 = 1 << 5;
const POSTCOPY: u32 = 1 << 15;
const POSTCOPY_RESUME: u32 = 1 << 19;

/// Time limit for libvirt to start a QEMU, with all of its disks and networks.
const STARTS: Duration = Duration::from_secs(300);
/// Time limit for libvirt to make a QEMU that runs wait for a new player.
const RESUMES: Duration = Duration::from_secs(60);
/// Time limit for answers that need no QEMU.
const ANSWERS: Duration = Duration::from_secs(30);
/// Time limit for libvirt to end a QEMU.
const ENDS: Duration = Duration::from_secs(120);

/// How a VM is handed over to its QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handover {
    /// The VM runs before its RAM is loaded.
    AtOnce,
    /// The VM runs already, and a new player sends the pages that the last one has not sent.
    Resumed,
    /// The VM runs once everything is loaded.
    Whole {
        /// Whether the VM stays paused.
        paused: bool,
    },
}

impl Handover {
    fn flags(self) -> u32 {
        LIVE | match self {
            Self::AtOnce => POSTCOPY,
            Self::Resumed => POSTCOPY | POSTCOPY_RESUME,
            Self::Whole { paused: false } => 0,
            Self::Whole { paused: true } => PAUSED,
        }
    }
}

/// State of a domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum State {
    /// Its CPUs run.
    Running(Why),
    /// Its CPUs are stopped.
    Paused(Why),
    /// Any other state, by libvirt's number.
    Other(i32),
}

impl State {
    /// The reason, for a domain that runs or is paused.
    #[must_use]
    pub fn why(self) -> Option<Why> {
        match self {
            Self::Running(why) | Self::Paused(why) => Some(why),
            Self::Other(_) => None,
        }
    }
}

/// The reason why a domain runs or is paused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Why {
    /// Its RAM is being loaded.
    Postcopy,
    /// Its RAM was being loaded, and its player has gone.
    PostcopyFailed,
    /// libvirt has prepared it for a VM that comes, and has not taken the VM over.
    Coming,
    /// Any other reason.
    Other,
}

/// User and group of libvirt's QEMUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    /// Number of the user.
    pub user: u32,
    /// Number of the group.
    pub group: u32,
}

impl Connection {
    /// Returns user and group of the QEMUs that libvirt starts; `None` if libvirt does not report
    /// them.
    ///
    /// # Errors
    ///
    /// The daemon's error; [`LibvirtError::Answer`] for an answer that is not XML.
    pub fn owner(&mut self) -> Result<Option<Owner>, LibvirtError> {
        let capabilities =
            self.call(CAPABILITIES, &Arguments::default(), Some(ANSWERS), |results| {
                results.text().map(str::to_owned)
            })?;
        owner(&capabilities)
    }

    /// Starts a QEMU for `domain`, which listens at the unix socket `socket` for the VM.
    ///
    /// # Errors
    ///
    /// libvirt's error: a domain with this name or UUID runs, or its QEMU does not start or cannot
    /// do postcopy.
    pub fn prepare(
        &mut self,
        domain: &Domain,
        socket: &str,
        handover: Handover,
    ) -> Result<(), LibvirtError> {
        let uri = format!("unix://{socket}");
        let arguments = Arguments::default()
            .parameters(&[("destination_xml", domain.xml()), ("migrate_uri", &uri)])
            .opaque(&domain.cookie())
            .number(handover.flags());
        let limit = if handover == Handover::Resumed { RESUMES } else { STARTS };
        self.call(PREPARE, &arguments, Some(limit), |results| {
            results.opaque()?;
            results.optional().map(drop)
        })
    }

    /// Makes libvirt take the VM over. libvirt starts the CPUs once the devices are loaded, and
    /// answers once everything is loaded. There is no time limit.
    ///
    /// # Errors
    ///
    /// libvirt's error. libvirt has then ended a VM that has not run. A VM that has run stays, and
    /// waits for a new player.
    pub fn finish(&mut self, domain: &Domain, handover: Handover) -> Result<(), LibvirtError> {
        self.call(FINISH, &ending(domain, handover, false), None, |_| Ok(()))
    }

    /// Makes libvirt end the QEMU of [`Connection::prepare`], in which the VM has not run.
    ///
    /// # Errors
    ///
    /// libvirt's error.
    pub fn cancel(&mut self, domain: &Domain, handover: Handover) -> Result<(), LibvirtError> {
        match self.call(FINISH, &ending(domain, handover, true), Some(ENDS), |_| Ok(())) {
            Err(error) if error.is(LibvirtError::CANCELLED) => Ok(()),
            result => result,
        }
    }

    /// Returns the state of a domain; `None` if libvirt does not know the domain.
    ///
    /// # Errors
    ///
    /// libvirt's error.
    pub fn state(&mut self, domain: &Domain) -> Result<Option<State>, LibvirtError> {
        let arguments = Arguments::default()
            .opaque(domain.name().as_bytes())
            .fixed(domain.raw_uuid())
            .number(u32::MAX)
            .number(0);
        let state = self.call(STATE, &arguments, Some(ANSWERS), |results| {
            Ok((results.signed()?, results.signed()?))
        });
        match state {
            Ok((state, reason)) => Ok(Some(state_of(state, reason))),
            Err(error) if error.is(LibvirtError::NO_DOMAIN) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

fn ending(domain: &Domain, handover: Handover, is_cancelled: bool) -> Arguments {
    Arguments::default()
        .parameters(&[("destination_name", domain.name())])
        .opaque(&domain.cookie())
        .number(handover.flags())
        .number(is_cancelled.into())
}

fn state_of(state: i32, reason: i32) -> State {
    match (state, reason) {
        (1, 10) => State::Running(Why::Postcopy),
        (1, 11) => State::Running(Why::PostcopyFailed),
        (1, _) => State::Running(Why::Other),
        (3, 2) => State::Paused(Why::Coming),
        (3, 12) => State::Paused(Why::Postcopy),
        (3, 13) => State::Paused(Why::PostcopyFailed),
        (3, _) => State::Paused(Why::Other),
        _ => State::Other(state),
    }
}

/// Reads the label that libvirt's security model `dac` gives to QEMUs: `+USER:+GROUP`.
fn owner(capabilities: &str) -> Result<Option<Owner>, LibvirtError> {
    let (mut is_dac, mut found) = (false, None);
    visit(capabilities, |open| {
        let [.., above, element] = open else { return };
        match (above.name, element.name) {
            ("secmodel", "model") => is_dac = element.text == "dac",
            ("secmodel", "baselabel") if is_dac && found.is_none() => {
                found = parse_owner(&element.text);
            }
            _ => {}
        }
    })
    .map_err(|_| LibvirtError::Answer("capabilities that are no XML"))?;
    Ok(found)
}

fn parse_owner(label: &str) -> Option<Owner> {
    let (user, group) = label.split_once(':')?;
    let number = |text: &str| text.strip_prefix('+')?.parse().ok();
    Some(Owner { user: number(user)?, group: number(group)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_owner_of_qemu_is_that_of_model_dac() {
        let capabilities = "<capabilities><host><secmodel><model>apparmor</model><doi>0</doi>\
            <baselabel type='kvm'>+1:+1</baselabel></secmodel><secmodel><model>dac</model>\
            <doi>0</doi><baselabel type='kvm'>+64055:+108</baselabel>\
            <baselabel type='qemu'>+2:+2</baselabel></secmodel></host></capabilities>";
        let expected = Owner { user: 64055, group: 108 };
        assert_eq!(owner(capabilities).unwrap(), Some(expected));
        assert_eq!(owner("<capabilities/>").unwrap(), None);
        assert_eq!(owner(&capabilities.replace("+64055", "qemu")).unwrap().unwrap().user, 2);
        assert!(owner("<capabilities>").is_err());
    }

    #[test]
    fn flags_are_libvirt_s() {
        assert_eq!(Handover::AtOnce.flags(), 0x8001);
        assert_eq!(Handover::Resumed.flags(), 0x88001);
        assert_eq!(Handover::Whole { paused: true }.flags(), 0x21);
        assert_eq!(state_of(1, 11).why(), Some(Why::PostcopyFailed));
        // 11 is the reason of a domain that starts up.
        assert_eq!(state_of(3, 11).why(), Some(Why::Other));
        assert_eq!(state_of(3, 12).why(), Some(Why::Postcopy));
        assert_eq!(state_of(3, 13).why(), Some(Why::PostcopyFailed));
        assert_eq!(state_of(5, 0), State::Other(5));
    }
}
