//! The device state and the records stored with it.

use crate::layout::MAX_STATE;
use crate::Damage;

/// Everything in a saved VM except its RAM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// QEMU's file header and configuration section, without the capabilities subsection.
    pub configuration: Vec<u8>,
    /// Section id of the RAM section.
    pub ram_section: u32,
    /// Version of the RAM section.
    pub ram_version: u32,
    /// Device sections that precede the pages.
    pub early: Vec<u8>,
    /// Device sections.
    pub devices: Vec<u8>,
    /// QEMU's vmdescription of the device sections (JSON); empty if there is none.
    pub description: Vec<u8>,
    /// One JSON object for `platen image info`.
    pub facts: Vec<u8>,
}

/// Maximum length of the facts.
const MAX_FACTS: usize = 64 << 10;

impl State {
    /// The machine type in the configuration section, if the section states one.
    pub fn machine(&self) -> Option<&str> {
        // Magic and version, then tag 7, length and name.
        let rest = self.configuration.get(8..)?.strip_prefix(&[7])?;
        let (len, rest) = rest.split_first_chunk::<4>()?;
        let name = rest.get(..usize::try_from(u32::from_be_bytes(*len)).ok()?)?;
        std::str::from_utf8(name).ok()
    }

    /// QEMU's name for the state of the VM at the moment of its device state, such as `running` or
    /// `paused`; `None` if no section has it, or if it cannot be told which one has it.
    pub fn run_state(&self) -> Option<&str> {
        let name = self.devices.get(self.run_state_field()? + 4..)?;
        std::str::from_utf8(name.split(|&byte| byte == 0).next()?).ok()
    }

    /// The device sections of a VM in state `paused`, with state `running` instead: a QEMU that
    /// loads them runs the VM, unless it was started with `-S`. `None` if [`State::run_state`] is
    /// another one.
    pub fn devices_that_run(&self) -> Option<Vec<u8>> {
        const PAUSED: &[u8; 12] = b"\0\0\0\x07paused\0\0";
        const RUNNING: &[u8; 12] = b"\0\0\0\x08running\0";
        let at = self.run_state_field()?;
        let field = at..at + PAUSED.len();
        (self.devices.get(field.clone())? == PAUSED).then(|| {
            let mut devices = self.devices.clone();
            devices[field].copy_from_slice(RUNNING);
            devices
        })
    }

    /// Offset of the run state in the device sections: a length of 4 bytes, and QEMU's name for the
    /// state in 100 bytes, with zeros behind it.
    fn run_state_field(&self) -> Option<usize> {
        // Name, instance and version of the section.
        const HEAD: &[u8] = b"\x0bglobalstate\0\0\0\0\0\0\0\x01";
        let windows = self.devices.windows(HEAD.len()).enumerate();
        let mut places = windows.filter(|(_, window)| *window == HEAD).map(|(at, _)| at);
        let at = places.next()?;
        // Sections have no lengths, and a guest chooses bytes of its devices' sections, such as
        // its MAC filters: it must not choose whether its VM runs.
        places.next().is_none().then_some(at + HEAD.len())
    }

    /// Encodes the state; `None` if it exceeds the limits.
    pub(crate) fn to_bytes(&self) -> Option<Vec<u8>> {
        if self.facts.len() > MAX_FACTS {
            return None;
        }
        let ram = [self.ram_section.to_be_bytes(), self.ram_version.to_be_bytes()].concat();
        let mut out = Vec::new();
        let records =
            [&self.configuration, &ram, &self.early, &self.devices, &self.description, &self.facts];
        for (tag, record) in (1_u8..).zip(records) {
            out.push(tag);
            out.extend((record.len() as u64).to_be_bytes());
            out.extend_from_slice(record);
        }
        (out.len() as u64 <= MAX_STATE).then_some(out)
    }

    /// Decodes the state.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Result<Self, Damage> {
        let mut at = 0;
        let mut record = |tag: u8, what: &'static str| {
            let damage = Damage::StateForm { what, at };
            let head = bytes.get(at..at + 9).ok_or_else(|| damage.clone())?;
            let len = u64::from_be_bytes(head[1..].try_into().expect("8 bytes"));
            let len = usize::try_from(len).map_err(|_| damage.clone())?;
            let end = (at + 9).checked_add(len).filter(|&end| end <= bytes.len());
            let (Some(end), true) = (end, head[0] == tag) else { return Err(damage) };
            let record = &bytes[at + 9..end];
            at = end;
            Ok(record)
        };
        let configuration = record(1, "no configuration")?.to_vec();
        let ram = record(2, "no RAM section")?;
        let early = record(3, "no early sections")?.to_vec();
        let devices = record(4, "no device sections")?.to_vec();
        let description = record(5, "no description")?.to_vec();
        let facts = record(6, "no facts")?.to_vec();
        let Some((section, version)) =
            ram.split_first_chunk::<4>().filter(|(_, rest)| rest.len() == 4)
        else {
            return Err(Damage::StateForm { what: "a RAM section of another length", at: 0 });
        };
        if at != bytes.len() || facts.len() > MAX_FACTS {
            return Err(Damage::StateForm { what: "more than the documented records", at });
        }
        let word = |bytes: &[u8]| u32::from_be_bytes(bytes.try_into().expect("4 bytes"));
        let (ram_section, ram_version) = (word(section), word(version));
        Ok(Self { configuration, ram_section, ram_version, early, devices, description, facts })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_comes_back_and_any_cut_is_refused() {
        let state = State {
            configuration: b"QEVM\0\0\0\x03\x07\0\0\0\x06pc-1.0".to_vec(),
            ram_section: 2,
            ram_version: 4,
            early: b"early".to_vec(),
            devices: vec![9; 300],
            description: b"{}".to_vec(),
            facts: b"{}".to_vec(),
        };
        assert_eq!(state.machine(), Some("pc-1.0"));
        let bytes = state.to_bytes().unwrap();
        assert_eq!(State::from_bytes(&bytes), Ok(state.clone()));
        for len in 0..bytes.len() {
            assert!(State::from_bytes(&bytes[..len]).is_err(), "cut at {len}");
        }
        assert!(State::from_bytes(&[&bytes[..], &[0]].concat()).is_err());
        assert_eq!(State { facts: vec![b' '; 1 << 17], ..state }.to_bytes(), None);
    }

    #[test]
    fn the_run_state_is_that_of_its_section() {
        // As QEMU 7.2 and 10.0 send it.
        let mut devices =
            b"\x04\0\0\0\x28\x0bglobalstate\0\0\0\0\0\0\0\x01\0\0\0\x07paused".to_vec();
        let run_state = |devices: &[u8]| {
            let state = State { devices: devices.to_vec(), ..State::default() };
            state.run_state().map(str::to_owned)
        };
        devices.resize(devices.len() + 94, 0);
        devices.extend(b"\x7e\0\0\0\x28");
        assert_eq!(run_state(&devices).as_deref(), Some("paused"));
        assert_eq!(run_state(&devices[..26]), None);
        assert_eq!(run_state(b"globalstate"), None);
        // A guest has written the same bytes to a device before.
        let forged = b"\x0bglobalstate\0\0\0\0\0\0\0\x01\0\0\0\x08running\0";
        assert_eq!(run_state(&[&forged[..], &devices[..]].concat()), None);
        assert_eq!(run_state(&[&devices[..], &forged[..]].concat()), None);
    }

    #[test]
    fn only_a_paused_vm_gets_another_run_state_and_no_other_byte_changes() {
        let devices = |len: u8, name: &[u8], copies: usize| {
            let mut one = b"\x04\0\0\0\x28\x0bglobalstate\0\0\0\0\0\0\0\x01\0\0\0".to_vec();
            one.push(len);
            one.extend(name);
            one.resize(one.len() + 100 - name.len(), 0);
            one.extend(b"\x7e\0\0\0\x28");
            [&b"paused\0\0"[..], &one.repeat(copies)].concat()
        };
        let that_run = |devices| State { devices, ..State::default() }.devices_that_run();
        let running = devices(8, b"running", 1);
        assert_eq!(that_run(devices(7, b"paused", 1)), Some(running.clone()));
        // A VM that sleeps would wake.
        for other in [running, devices(10, b"suspended", 1), devices(7, b"paused", 2)] {
            assert_eq!(that_run(other), None);
        }
        let mut cut = devices(7, b"paused", 1);
        cut.truncate(8 + 5 + 20 + 11);
        assert_eq!(that_run(cut), None);
    }
}
