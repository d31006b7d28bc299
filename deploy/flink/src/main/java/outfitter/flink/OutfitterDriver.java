package outfitter.flink;

import java.util.Set;
import org.apache.flink.api.common.externalresource.ExternalResourceDriver;
import org.apache.flink.api.common.externalresource.ExternalResourceInfo;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * Gets the devices of this task manager. They are its own until the JVM ends, however it ends: Outfitter's manager
 * watches the process, and {@code outfitter hold} gives them back at an orderly end.
 */
final class OutfitterDriver implements ExternalResourceDriver {

    private static final Logger LOG = LoggerFactory.getLogger(OutfitterDriver.class);

    private final Settings settings;

    OutfitterDriver(Settings settings) {
        this.settings = settings;
    }

    /**
     * Wait for the devices.
     *
     * @param amount how many
     * @return the devices, with all properties that their driver in Outfitter has reported
     * @throws NoDevicesError there are none, and {@code on-failure} is {@code exit}: the task manager ends
     * @throws NoDevicesException the same, and {@code on-failure} is {@code continue}: Flink logs a warning
     */
    @Override
    public Set<? extends ExternalResourceInfo> retrieveResourceInfo(long amount) throws NoDevicesException {
        Hold hold = new Hold(settings, amount, this::lost);
        try {
            Set<DeviceInfo> devices = hold.start();
            LOG.info("Outfitter has granted {} of {}: {}", amount, settings.resource, devices);
            return devices;
        } catch (NoDevicesException error) {
            hold.close();
            if (settings.exits) {
                throw new NoDevicesError(error.getMessage(), error);
            }
            throw error;
        }
    }

    /** The allocation ended while this JVM lives: another worker may get the devices. */
    private void lost(String reason) {
        if (!settings.exits) {
            LOG.error("The devices of {} are lost, and on-failure is continue: {}", settings.resource, reason);
            return;
        }
        LOG.error("The devices of {} are lost, so this task manager ends: {}", settings.resource, reason);
        Thread exit = new Thread(() -> System.exit(1), "outfitter-exit");
        exit.setDaemon(true);
        exit.start();
        try {
            exit.join(10_000); // shutdown hooks of others may hang, and the devices are no longer ours
        } catch (InterruptedException error) {
            Thread.currentThread().interrupt();
        }
        Runtime.getRuntime().halt(1);
    }
}
