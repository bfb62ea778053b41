//! A domain, as its XML describes it, and the cookie of its migration.

use crate::xml::{encoded, visit};
use crate::XmlError;

/// The longest XML that libvirt accepts, bytes.
const MAX_XML: usize = 4 << 20;

/// A domain that is to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Domain {
    xml: String,
    name: String,
    uuid: [u8; 16],
    machine: Option<String>,
    huge_pages: bool,
}

impl Domain {
    /// Reads a domain's XML. libvirt reads the XML again, and decides.
    ///
    /// # Errors
    ///
    /// The text is not XML, is too long, or lacks a name or a UUID.
    pub fn parse(xml: &str) -> Result<Self, XmlError> {
        if xml.len() > MAX_XML {
            return Err(XmlError::Long(xml.len()));
        }
        let (mut name, mut uuid, mut machine, mut huge_pages) = (None, None, None, false);
        visit(xml, |open| {
            let mut path = [""; 3];
            if open.len() <= path.len() {
                path.iter_mut().zip(open).for_each(|(part, element)| *part = element.name);
            }
            let Some(element) = open.last() else { return };
            match path {
                ["domain", "name", ""] => name = Some(element.text.clone()),
                ["domain", "uuid", ""] => uuid = Some(element.text.clone()),
                ["domain", "os", "type"] => machine = element.attribute("machine"),
                ["domain", "memoryBacking", "hugepages"] => huge_pages = true,
                _ => {}
            }
        })?;
        let name = name.filter(|name| !name.is_empty()).ok_or(XmlError::Lacks("name"))?;
        let uuid = parse_uuid(&uuid.ok_or(XmlError::Lacks("uuid"))?).ok_or(XmlError::Uuid)?;
        Ok(Self { xml: xml.to_owned(), name, uuid, machine, huge_pages })
    }

    /// The domain's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The domain's UUID, as libvirt writes it.
    #[must_use]
    pub fn uuid(&self) -> String {
        let hex: String = self.uuid.iter().map(|byte| format!("{byte:02x}")).collect();
        [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
    }

    /// The machine type, if the XML has one. It may be an alias such as `q35`.
    #[must_use]
    pub fn machine(&self) -> Option<&str> {
        self.machine.as_deref()
    }

    /// Whether the domain's RAM may have huge pages.
    #[must_use]
    pub fn has_huge_pages(&self) -> bool {
        self.huge_pages
    }

    pub(crate) fn xml(&self) -> &str {
        &self.xml
    }

    pub(crate) fn raw_uuid(&self) -> &[u8; 16] {
        &self.uuid
    }

    /// The cookie of a source that has none of the optional features, so that libvirt turns none of
    /// QEMU's optional capabilities on (`postcopy-preempt` would need a second connection).
    /// Without a cookie libvirt has no list of the source's capabilities, and crashes.
    pub(crate) fn cookie(&self) -> Vec<u8> {
        let text = format!(
            "<qemu-migration><name>{}</name><uuid>{}</uuid><hostname>platen</hostname>\
             <hostuuid>{SOURCE}</hostuuid></qemu-migration>\0",
            encoded(&self.name),
            self.uuid()
        );
        text.into_bytes()
    }
}

/// UUID of the host that the VM seems to come from. libvirt refuses the UUID of its own host.
const SOURCE: &str = "706c6174-656e-4d73-8a76-65642d766d73";

/// Parses a UUID with or without hyphens, as libvirt does.
fn parse_uuid(text: &str) -> Option<[u8; 16]> {
    let text = text.trim();
    let digits: Vec<u32> = text
        .chars()
        .filter(|&sign| sign != '-')
        .map(|sign| sign.to_digit(16))
        .collect::<Option<_>>()?;
    let bytes: Vec<u8> = digits
        .chunks_exact(2)
        .map(|pair| u8::try_from(pair[0] * 16 + pair[1]).expect("two digits"))
        .collect();
    (digits.len() == 32).then(|| bytes.try_into().expect("16 bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const XML: &str = "<domain type='kvm' id='7'>
  <metadata><app><name>not this</name></app></metadata>
  <name>a &amp; b</name>
  <uuid>592EF32C27a5-4f79-ba49-16196c787853</uuid>
  <os><type arch='x86_64' machine='pc-q35-7.2'>hvm</type></os>
  <devices><disk><source><name>nor this</name></source></disk></devices>
</domain>";

    #[test]
    fn name_uuid_and_machine_are_the_domain_s_own() {
        let domain = Domain::parse(XML).unwrap();
        assert_eq!(domain.name(), "a & b");
        assert_eq!(domain.uuid(), "592ef32c-27a5-4f79-ba49-16196c787853");
        assert_eq!(domain.machine(), Some("pc-q35-7.2"));
        let cookie = String::from_utf8(domain.cookie()).unwrap();
        assert!(cookie.contains("<name>a &amp; b</name>") && cookie.ends_with(">\0"), "{cookie}");
    }

    #[test]
    fn huge_pages_are_those_of_the_domain_s_memory() {
        let with = |backing: &str| {
            let xml = XML.replace("<devices>", &format!("{backing}<devices>"));
            Domain::parse(&xml).unwrap().has_huge_pages()
        };
        assert!(with("<memoryBacking><hugepages/></memoryBacking>"));
        assert!(with(
            "<memoryBacking><hugepages><page size='2' unit='M'/></hugepages></memoryBacking>"
        ));
        assert!(!with("<memoryBacking><nosharepages/></memoryBacking>"));
        assert!(!with("<metadata><hugepages/></metadata>"));
    }

    #[test]
    fn a_description_that_says_too_little_is_refused() {
        let without = |from: &str, to: &str| Domain::parse(&XML.replace(from, to)).unwrap_err();
        assert_eq!(without("<name>a &amp; b</name>", ""), XmlError::Lacks("name"));
        assert_eq!(without("<name>a &amp; b</name>", "<name/>"), XmlError::Lacks("name"));
        assert_eq!(without("uuid>", "id>"), XmlError::Lacks("uuid"));
        assert_eq!(without("592EF32C", "592EF32"), XmlError::Uuid);
        assert_eq!(without("592EF32C", "ä92EF32C"), XmlError::Uuid);
        assert_eq!(Domain::parse("domain").unwrap_err(), XmlError::Lacks("name"));
        assert!(matches!(without("</domain>", ""), XmlError::Syntax(_)));
        assert_eq!(
            Domain::parse(&" ".repeat(MAX_XML + 1)).unwrap_err(),
            XmlError::Long(MAX_XML + 1)
        );
    }
}
