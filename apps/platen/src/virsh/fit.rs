//! Checks whether a domain is that of the image, as far as its XML shows.

use image::Image;
use libvirt::Domain;

/// The image's machine type, if the domain has another one. An alias (`q35`) may be any version of
/// its type; QEMU itself compares that before the VM runs.
pub(super) fn machine_differs(domain: &Domain, image: &Image) -> Option<String> {
    let (saved, here) = (image.state().machine()?, domain.machine()?);
    (!is_it(saved, here)).then(|| saved.to_owned())
}

fn is_it(saved: &str, here: &str) -> bool {
    let saved_as = |name: &str| {
        saved
            .strip_prefix(name)
            .and_then(|rest| rest.strip_prefix('-'))
            .is_some_and(|version| version.starts_with(|sign: char| sign.is_ascii_digit()))
    };
    saved == here || saved_as(here) || saved_as(&format!("pc-{here}")) || {
        here == "pc" && saved_as("pc-i440fx")
    }
}

/// The reason why the domain's RAM cannot be loaded while the VM runs. An image that was imported
/// does not say of which pages its RAM was.
pub(super) fn domain_not_instant(domain: &Domain) -> Option<String> {
    domain.has_huge_pages().then(|| format!("domain {} has huge pages", domain.name()))
}

/// Whether libvirt, or the QEMU that it has started, cannot do postcopy on this host.
pub(super) fn refuses_postcopy(message: &str) -> bool {
    let message = message.to_ascii_lowercase();
    ["postcopy", "post-copy", "userfault"].iter().any(|word| message.contains(word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_alias_is_any_version_of_its_machine_type() {
        for (saved, here) in [
            ("pc-q35-7.2", "pc-q35-7.2"),
            ("pc-q35-7.2", "q35"),
            ("pc-i440fx-7.2", "pc"),
            ("virt-7.2", "virt"),
        ] {
            assert!(is_it(saved, here), "{saved} {here}");
        }
        for (saved, here) in [
            ("pc-q35-7.2", "pc-q35-8.0"),
            ("pc-q35-7.2", "pc"),
            ("pc-i440fx-7.2", "q35"),
            ("pc-q35-7.2", "pc-q35-7.20"),
            ("microvm", "pc-q35-7.2"),
        ] {
            assert!(!is_it(saved, here), "{saved} {here}");
        }
    }

    #[test]
    fn a_domain_with_huge_pages_is_loaded_before_it_runs() {
        let domain = |backing: &str| {
            let uuid = "<uuid>592ef32c-27a5-4f79-ba49-16196c787853</uuid>";
            Domain::parse(&format!("<domain><name>g1</name>{uuid}{backing}</domain>")).unwrap()
        };
        let huge = domain("<memoryBacking><hugepages/></memoryBacking>");
        assert_eq!(domain_not_instant(&huge).unwrap(), "domain g1 has huge pages");
        assert_eq!(domain_not_instant(&domain("")), None);
    }

    #[test]
    fn a_qemu_that_may_not_use_userfaultfd_is_told_from_other_errors() {
        assert!(refuses_postcopy("unable to execute QEMU command: Postcopy is not supported"));
        assert!(!refuses_postcopy("Requested operation is not valid: domain is already active"));
    }
}
