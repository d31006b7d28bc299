package outfitter.flink;

import org.apache.flink.api.common.externalresource.ExternalResourceDriver;
import org.apache.flink.api.common.externalresource.ExternalResourceDriverFactory;
import org.apache.flink.configuration.Configuration;

/**
 * Builds the driver of one resource. Flink finds it by {@code external-resource.<name>.driver-factory.class}, and calls
 * it once in each task manager, on the main thread, before the task manager registers.
 */
public final class OutfitterDriverFactory implements ExternalResourceDriverFactory {

    /**
     * @param config the resource's {@code param.*}, without that prefix: see {@link Settings}
     * @throws NoDevicesError a setting is wrong, and {@code on-failure} is {@code exit}
     */
    @Override
    public ExternalResourceDriver createExternalResourceDriver(Configuration config) {
        Settings settings = Settings.of(config.toMap());
        return new OutfitterDriver(settings);
    }
}
